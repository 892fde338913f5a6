"""Cross attention in plain torch operations: the layers of a decoder that attend over an encoder's output."""

from __future__ import annotations

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from services.attn_worker.cache.source_group import StepSources
from services.attn_worker.cache.spec import KVCacheSpec
from services.attn_worker.cache.step_metadata import StepMetadata
from services.attn_worker.layers.cross.source_storage import SourceStorage
from services.channel import Channel, rows_of_layer
from services.common.attention.learned import Learned


class TorchCrossAttention:
    """`OtherLayers` for any torch device: the default on a CPU, and the reference for the kernels.

    Of rows of qkv they read the q heads alone. Rows that read the same slot, such as beams, are computed together.
    """

    def __init__(self, spec: KVCacheSpec, scale: float | None, device: torch.device) -> None:
        """`scale`: of the scores; None: 1 / sqrt(head_dim). Raises CapacityError if memory is too small."""
        self.storage = SourceStorage(spec, device)
        self._heads = spec.cross_layers
        self._scale = scale
        self._device = device
        self._groups: list[tuple[int, int, slice | torch.Tensor]] = []  # slot, length, rows of the step

    def use_learned(self, learned: Learned) -> None:
        """These layers have nothing of it."""

    def take_extra_rows(self, step: StepMetadata, channel: Channel) -> None:
        """Stores the outputs of encoders that the step writes."""
        self.storage.take(step, channel)

    def begin_step(self, step: StepMetadata) -> None:
        """Groups the step's rows by slot."""
        sources = step.of(StepSources)
        slots = np.repeat(sources.slots, step.num_tokens)
        lengths = dict(zip(sources.slots.tolist(), sources.lengths.tolist(), strict=True))
        order = np.argsort(slots, kind="stable")
        starts = np.flatnonzero(np.diff(slots[order], prepend=-1)) if len(slots) else np.zeros(0, np.int64)
        self._groups = []
        for rows in np.split(order, starts[1:]) if len(slots) else []:
            slot, first, last = int(slots[rows[0]]), int(rows[0]), int(rows[-1])
            is_slice = last - first + 1 == len(rows)
            place = slice(first, last + 1) if is_slice else torch.from_numpy(rows).to(self._device)
            self._groups.append((slot, lengths[slot], place))

    def forward(self, layer: int, qkv: torch.Tensor, out: torch.Tensor) -> None:
        """qkv: rows of q heads alone, [num_tokens, q_size]; out: [num_tokens, attn_size], written in place."""
        heads, storage = self._heads[layer], self.storage.layers[layer]
        query = rows_of_layer(qkv, heads.q_size).view(-1, heads.num_heads, heads.head_dim)
        out = rows_of_layer(out, heads.attn_size).view(query.shape)
        for slot, length, rows in self._groups:
            keys, values = storage[slot, :length].unbind(1)
            attended = scaled_dot_product_attention(
                query[rows].transpose(0, 1).to(keys.dtype),
                keys.transpose(0, 1),
                values.transpose(0, 1),
                scale=self._scale,
                enable_gqa=heads.num_heads > heads.num_kv_heads,
            )
            out[rows] = attended.transpose(0, 1).to(out.dtype)
