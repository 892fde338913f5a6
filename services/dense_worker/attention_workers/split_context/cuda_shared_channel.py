"""`CudaSharedChannel`: a `CudaJoinedChannel` in whose steps a row may belong to several attention workers."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from services.channel import rows_of_layer
from services.channel.cuda_slots import NUM_SLOTS
from services.dense_worker.attention_workers.cuda_joined_channel import CudaJoinedChannel
from services.dense_worker.attention_workers.joined_channel import LayerSizes
from services.dense_worker.attention_workers.split_context.triton_shared_rows import give_rows, take_rows


class CudaSharedChannel(CudaJoinedChannel):
    """It has as many kernels in each layer, which read the shares of each row: graphs serve all steps, too."""

    def _num_inputs(self, max_rows: int) -> int:
        return NUM_SLOTS + max_rows + 1 + 2 * NUM_SLOTS * max_rows

    def _write_inputs(self, stage: torch.Tensor, num_rows: int, rows_by_slot: Mapping[int, np.ndarray]) -> int:
        """Rows of each slot; where the shares of each row begin; the shares, see `triton_shared_rows`."""
        counts, starts, shares = (each.numpy() for each in _unpack(stage, num_rows))
        counts[:], starts[0] = 0, 0
        columns = [np.zeros((3, 0), np.int64)]
        for slot, own in rows_by_slot.items():
            counts[slot] = len(own)
            columns.append(np.stack([own, np.full(len(own), slot), np.arange(len(own))]))
        rows, slots, places = np.concatenate(columns, axis=1)
        np.cumsum(np.bincount(rows, minlength=num_rows), out=starts[1:])
        order = np.argsort(rows, kind="stable")
        shares[: len(rows)] = np.stack([slots[order], places[order]], axis=1)
        return NUM_SLOTS + num_rows + 1 + 2 * len(rows)

    def _give(self, qkv: torch.Tensor) -> None:
        _, starts, shares = _unpack(self._inputs, len(qkv))
        give_rows(qkv, self._table, starts, shares)

    def _take(self, attn_out: torch.Tensor, sizes: LayerSizes) -> None:
        _, starts, shares = _unpack(self._inputs, len(attn_out))
        take_rows(attn_out, self._table, starts, shares, sizes.num_heads, sizes.qkv)

    def _compile(self) -> None:
        self._inputs.zero_()  # rows of nobody
        for sizes in sorted(set(self._layers)):
            self._give(rows_of_layer(self.qkv[:1], sizes.qkv))
            self._take(rows_of_layer(self.attn_out[:1], sizes.attn_out), sizes)


def _unpack(packed: torch.Tensor, num_rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Views, int32: rows of each slot [NUM_SLOTS], `starts` and `shares`, with room for more shares."""
    counts, starts, shares = packed.split([NUM_SLOTS, num_rows + 1, len(packed) - NUM_SLOTS - num_rows - 1])
    return counts, starts, shares[: len(shares) // 2 * 2].view(-1, 2)
