"""`CudaJoinedChannel`: a `JoinedChannel` on a GPU, whose steps may be captured CUDA graphs.

A graph knows neither the workers nor how rows are dealt: both are tables in device memory (`channel/cuda_slots.py`),
which `begin_step` fills before the graph is launched. Per layer there are two kernels in each direction, for any number
of workers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence

import numpy as np
import torch

from services.channel import ChannelAborted, ChannelSpec, Flag, rows_of_layer
from services.channel.cuda_ipc import CudaIpcChannel
from services.channel.cuda_slots import ATTN_OUT, NUM_SLOTS, QKV, WORDS_PER_SLOT, SlotFlags
from services.dense_worker.attention_workers.joined_channel import JoinedSeams, LayerSizes
from services.dense_worker.attention_workers.triton_rows import copy_rows

_NUM_STAGES = 4  # pinned buffers, used in turn: one is being filled, others may have pending copies
_KEPT_S = 0.3  # how long a worker that is gone stays mapped, if no other one comes


class CudaJoinedChannel(JoinedSeams[CudaIpcChannel]):
    """On a GPU: it enqueues copies of rows, and waits on the device."""

    waited_s: float | None = None
    num_waits: int | None = None
    is_waiting = False

    def __init__(
        self,
        spec: ChannelSpec,
        layers: Sequence[LayerSizes],
        members: Mapping[int, CudaIpcChannel],
        on_lost: Callable[[int, str], None],
        device: torch.device,
    ) -> None:
        super().__init__(spec, layers, on_lost, device)
        self._slots: dict[int, int] = {}  # by cache_id
        self._table = torch.zeros(NUM_SLOTS, WORDS_PER_SLOT, dtype=torch.int64, device=device)
        self._host_table = torch.zeros(NUM_SLOTS, WORDS_PER_SLOT, dtype=torch.int64)
        # Of a step: rows of each slot, then the slot of each row, then each row's place in its region.
        size = self._num_inputs(spec.max_tokens)
        self._inputs = torch.zeros(size, dtype=torch.int32, device=device)
        self._stages = [torch.zeros(size, dtype=torch.int32, pin_memory=True) for _ in range(_NUM_STAGES)]
        self._dropped: list[CudaIpcChannel] = []  # still mapped
        self._dropped_s = 0.0  # since when, for the newest one
        self._num_begun = 0
        self._num_rows = 0  # of the layers that are being enqueued or captured
        self._flags = SlotFlags(device, self._table, self._inputs[:NUM_SLOTS])
        for cache_id, channel in members.items():
            self.add(cache_id, channel)
        self._compile()

    @property
    def lost_caches(self) -> Collection[int]:
        """Workers that have gone, by cache_id. If a seam is aborted, its rows of the last step may have no meaning."""
        for cache_id, channel in self._members.items():
            if cache_id not in self._lost and _is_aborted(channel):
                self._lost.add(cache_id)
                self._on_lost(cache_id, "its seam was aborted")
        return tuple(self._lost)

    def add(self, cache_id: int, channel: CudaIpcChannel) -> None:
        """A further worker has rows of later steps. Waits for the device, and unmaps those that are gone."""
        self._forget_lost()
        self._close_dropped()
        slot = next(each for each in range(NUM_SLOTS) if each not in self._slots.values())  # the client sees to it
        self._members[cache_id], self._slots[cache_id] = channel, slot
        self._host_table[slot] = torch.tensor(channel.slot_addresses)
        self._table.copy_(self._host_table)  # no step that is enqueued has rows in this slot

    def begin_step(self, step_id: int, num_rows: int) -> None:
        """Enqueues the tables of a step of `num_rows` rows, padding included; rows of nobody are passed by."""
        dealt = self._take_expected(step_id)
        if self._dropped and time.monotonic() - self._dropped_s > _KEPT_S:
            self._close_dropped()
        stage = self._stages[self._num_begun % _NUM_STAGES]
        self._num_begun += 1
        slots = {self._slots[each]: rows for each, rows in dealt.items() if each in self._slots}
        used = self._write_inputs(stage, num_rows, slots)
        self._inputs[:used].copy_(stage[:used], non_blocking=True)

    def _num_inputs(self, max_rows: int) -> int:
        """The most elements that `_write_inputs` writes."""
        return NUM_SLOTS + 2 * max_rows

    def _write_inputs(self, stage: torch.Tensor, num_rows: int, rows_by_slot: Mapping[int, np.ndarray]) -> int:
        """Writes the tables of a step to `stage`, the rows of each slot first, and returns how many elements it took.
        """
        counts, owners, places = _unpack(stage, num_rows)
        counts.zero_()
        owners.fill_(-1)
        for slot, rows in rows_by_slot.items():
            index = torch.from_numpy(rows)
            counts[slot] = len(rows)
            owners[index] = slot
            places[index] = torch.arange(len(rows), dtype=torch.int32)
        return NUM_SLOTS + 2 * num_rows

    def _forget_lost(self) -> None:
        """Frees the slots of those that are gone, too."""
        super()._forget_lost()
        self._slots = {cache_id: slot for cache_id, slot in self._slots.items() if cache_id in self._members}

    def _drop(self, channel: CudaIpcChannel) -> None:
        """Leaves it mapped for now. Unmapping takes longer than a step, for which all streams would wait just when
        others have to be computed again. But one that is to come may have no room before, and then would never come.
        """
        channel.retire()
        self._dropped.append(channel)
        self._dropped_s = time.monotonic()

    def close(self) -> None:
        super().close()
        self._close_dropped()

    def _close_dropped(self) -> None:
        while self._dropped:
            self._dropped.pop().close()

    def begin_layers(self, num_rows: int) -> None:
        """The layers of a step of so many rows are enqueued, or captured, from now on."""
        self._num_rows, self._layer = num_rows, 0

    def signal(self, flag: Flag) -> None:
        """Enqueues giving each worker its rows of qkv, and its flag."""
        self._give(rows_of_layer(self.qkv[: self._num_rows], self._layers[self._layer].qkv))
        self._flags.signal()

    def wait(self, flag: Flag) -> None:
        """Enqueues waiting for all workers that have rows, and taking their outputs."""
        self._flags.wait()
        sizes = self._layers[self._layer]
        self._take(rows_of_layer(self.attn_out[: self._num_rows], sizes.attn_out), sizes)
        self._layer += 1

    def _give(self, qkv: torch.Tensor) -> None:
        """Enqueues copying rows of qkv, [n, width], to their places."""
        _, owners, places = _unpack(self._inputs, len(qkv))
        copy_rows(qkv, self._table, owners, places, QKV, gives=True)

    def _take(self, attn_out: torch.Tensor, sizes: LayerSizes) -> None:
        """Enqueues copying rows of attn_out, [n, width], from there."""
        _, owners, places = _unpack(self._inputs, len(attn_out))
        copy_rows(attn_out, self._table, owners, places, ATTN_OUT, gives=False)

    def _compile(self) -> None:
        """Compiles the kernels of all widths, which a capture could not."""
        for layer in sorted({(each.qkv, each.attn_out) for each in self._layers}):
            own = torch.full((1,), -1, dtype=torch.int32, device=self.qkv.device)
            copy_rows(rows_of_layer(self.qkv[:1], layer[0]), self._table, own, own, QKV, gives=True)
            copy_rows(rows_of_layer(self.attn_out[:1], layer[1]), self._table, own, own, ATTN_OUT, gives=False)


def _unpack(packed: torch.Tensor, num_rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Views, int32: rows of each slot [NUM_SLOTS], the slot of each row and its place there, [num_rows] each."""
    owners, places = packed[NUM_SLOTS : NUM_SLOTS + 2 * num_rows].view(2, num_rows)
    return packed[:NUM_SLOTS], owners, places


def _is_aborted(channel: CudaIpcChannel) -> bool:
    try:
        channel.check()
    except ChannelAborted:
        return True
    return False
