"""Cross attention by a Triton kernel, which CUDA graphs can capture: one program for each row and head."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl

from services.attn_worker.cache.source_group import StepSources
from services.attn_worker.cache.spec import KVCacheSpec
from services.attn_worker.cache.step_metadata import StepMetadata
from services.attn_worker.layers.cross.source_storage import SourceStorage
from services.attn_worker.layers.step_upload import StepUpload
from services.channel import Channel, rows_of_layer
from services.common.attention.learned import Learned
from services.common.errors import CapacityError

_KEYS_PER_TILE = 128
_NUM_WARPS = 4


class TritonCrossAttention:
    """`CapturableLayers`. Grids and addresses depend on the number of rows alone, padding included."""

    captures_chunks = True

    def __init__(
        self, spec: KVCacheSpec, scale: float | None, device: torch.device, max_num_tokens: int
    ) -> None:
        """`scale`: of the scores; None: 1 / sqrt(head_dim). Raises CapacityError if memory is too small."""
        self.storage = SourceStorage(spec, device)
        self._heads = spec.cross_layers
        self.layers_to_compile: Sequence[int] = list(self._heads)[:1]
        self._scale = scale
        assert spec.source_slots is not None, "some layers have cross attention"
        self._null_slot = spec.source_slots.num_slots
        try:
            self._upload = StepUpload(2 * max_num_tokens, device)
        except RuntimeError as error:  # includes torch.OutOfMemoryError
            raise CapacityError(f"the rows of a step do not fit on {device}: {error}") from error

    def use_learned(self, learned: Learned) -> None:
        """These layers have nothing of it."""

    def take_extra_rows(self, step: StepMetadata, channel: Channel) -> None:
        """Stores the outputs of encoders that the step writes."""
        self.storage.take(step, channel)

    def begin_step(self, step: StepMetadata, padded_num_rows: int | None = None) -> None:
        """Sends the slot and the length of each row to the device. Padding reads a row of the null slot."""
        sources = step.of(StepSources)
        num_rows = len(step.positions)
        shape = (num_rows if padded_num_rows is None else padded_num_rows,)
        self._upload.begin()
        slots, self._slots = self._upload.reserve(shape)
        lengths, self._lengths = self._upload.reserve(shape)
        slots[:num_rows] = np.repeat(sources.slots, step.num_tokens)
        lengths[:num_rows] = np.repeat(sources.lengths, step.num_tokens)
        slots[num_rows:], lengths[num_rows:] = self._null_slot, 1
        self._upload.send()

    def forward(self, layer: int, qkv: torch.Tensor, out: torch.Tensor) -> None:
        """qkv: rows of q heads alone, [num_rows, q_size]; out: [num_rows, attn_size], written in place."""
        heads, storage = self._heads[layer], self.storage.layers[layer]
        query, out = rows_of_layer(qkv, heads.q_size), rows_of_layer(out, heads.attn_size)
        _cross_kernel[len(query), heads.num_heads](
            query,
            storage,
            out,
            self._slots,
            self._lengths,
            storage.stride(0),
            self._scale or heads.head_dim**-0.5,
            NUM_HEADS=heads.num_heads,
            NUM_KV_HEADS=heads.num_kv_heads,
            HEAD_DIM=heads.head_dim,
            PADDED_DIM=triton.next_power_of_2(heads.head_dim),
            TILE=_KEYS_PER_TILE,
            num_warps=_NUM_WARPS,
        )


@triton.jit
def _cross_kernel(
    query,  # [num_rows, NUM_HEADS * HEAD_DIM]
    storage,  # [num_slots, max_source_len, 2, NUM_KV_HEADS, HEAD_DIM]
    out,  # [num_rows, NUM_HEADS * HEAD_DIM]
    slots,  # int32 [num_rows]
    lengths,  # int32 [num_rows], at least 1
    slot_stride,
    scale,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    TILE: tl.constexpr,
):
    row, head = tl.program_id(0), tl.program_id(1)
    slot, length = tl.load(slots + row).to(tl.int64), tl.load(lengths + row)
    dims = tl.arange(0, PADDED_DIM)
    is_dim = dims < HEAD_DIM
    place = row.to(tl.int64) * NUM_HEADS * HEAD_DIM + head * HEAD_DIM + dims
    q = tl.load(query + place, mask=is_dim, other=0.0).to(tl.float32) * scale
    head_start = storage + slot * slot_stride + head // (NUM_HEADS // NUM_KV_HEADS) * HEAD_DIM
    highest = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    attended = tl.zeros([PADDED_DIM], tl.float32)
    for first in range(0, length, TILE):
        keys = first + tl.arange(0, TILE)
        is_key = keys < length
        addresses = head_start + keys[:, None] * (2 * NUM_KV_HEADS * HEAD_DIM) + dims[None, :]
        mask = is_key[:, None] & is_dim[None, :]
        k = tl.load(addresses, mask=mask, other=0.0).to(tl.float32)
        v = tl.load(addresses + NUM_KV_HEADS * HEAD_DIM, mask=mask, other=0.0).to(tl.float32)
        scores = tl.where(is_key, tl.sum(k * q[None, :], axis=1), float("-inf"))
        new_highest = tl.maximum(highest, tl.max(scores, axis=0))
        weights = tl.exp(scores - new_highest)
        rescale = tl.exp(highest - new_highest)
        total = total * rescale + tl.sum(weights, axis=0)
        attended = attended * rescale + tl.sum(weights[:, None] * v, axis=0)
        highest = new_highest
    tl.store(out + place, attended / total, mask=is_dim)
