"""`PartedTorchAttention`: attention on a CPU for steps with rows that see a part of their keys here.

Such a row gets the attention over this part, and the logarithm of its sum of exponentials for each head, which replaces
its keys in qkv (`log_sums_of`): with these the dense worker merges the parts.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from services.attn_worker.cache.step_metadata import StepMetadata
from services.attn_worker.layers import BackendSetup
from services.attn_worker.layers.mha.torch_attention import TorchAttention
from services.attn_worker.split_context.part_rows import PartRows, RowsOfParts
from services.channel.log_sums import log_sums_of
from services.common.attention.rope import UnboundedRotaryEmbedding
from services.common.model_config import RopeConfig

_MOST_SCORES = 2**22  # that are in memory at a time: 16 MiB


@dataclass(frozen=True, slots=True)
class _Part:
    """The rows of one sequence, on the device."""

    rows: slice
    num_keys: int  # that some row sees
    blocks: torch.Tensor  # int64, with these keys
    stored: slice  # those of the rows whose keys and values are kept here
    slots: torch.Tensor  # int64, of these
    last_keys: torch.Tensor  # int64 [num_rows], the place of the last key that a row sees; less than 0: it sees none
    angles: dict[RopeConfig, tuple[torch.Tensor, torch.Tensor]]


class PartedTorchAttention(TorchAttention):
    """A TorchAttention for layers with keys of all tokens, without bias or sinks (`check_split_context`)."""

    def __init__(self, setup: BackendSetup) -> None:
        super().__init__(setup)
        self._unbounded = {rope: UnboundedRotaryEmbedding(rope, self._device) for rope in self._ropes}
        self._split_parts: list[_Part] = []
        self._other_rows = torch.zeros(0, dtype=torch.int64)

    def begin_step(self, step: StepMetadata) -> None:
        split = next((each for each in step.others if isinstance(each, RowsOfParts)), None)
        self._split_parts = [] if split is None else [self._prepare_split(each) for each in split.parts]
        if split is not None and split.other_rows is not None:
            self._other_rows = self._to_device(split.other_rows)
        if split is None or len(self._other_rows):
            super().begin_step(step)

    def forward(self, layer: int, qkv: torch.Tensor, out: torch.Tensor) -> None:
        if not self._split_parts:
            super().forward(layer, qkv, out)
            return
        if len(self._other_rows):
            own = out.new_empty(len(self._other_rows), out.shape[1])
            super().forward(layer, qkv[self._other_rows], own)
            out[self._other_rows] = own
        for part in self._split_parts:
            self._attend_to_part(layer, part, qkv[part.rows], out[part.rows])

    def _prepare_split(self, part: PartRows) -> _Part:
        positions, tokens, block_size = part.positions, part.tokens, self._block_size
        kept = range(max(positions.start, tokens.start), min(positions.stop, tokens.stop))
        places = np.arange(kept.start, max(kept.start, kept.stop)) - tokens.start
        first = min(max(kept.start - positions.start, 0), len(positions))
        own = self._to_device(np.arange(positions.start, positions.stop))
        return _Part(
            rows=slice(part.first_row, part.first_row + len(positions)),
            num_keys=part.num_keys,
            blocks=self._to_device(part.block_ids[: -(-part.num_keys // block_size)]),
            stored=slice(first, first + len(places)),
            slots=self._to_device(part.block_ids[places // block_size] * block_size + places % block_size),
            last_keys=own - tokens.start,
            angles={rope: embedding(own, own) for rope, embedding in self._unbounded.items()},
        )

    def _attend_to_part(self, layer: int, part: _Part, qkv: torch.Tensor, out: torch.Tensor) -> None:
        """qkv [num_rows, qkv_size], whose keys become log-sums; out [num_rows, attn_size]."""
        heads, rope = self._config.layer_heads[layer], self._config.layer_ropes[layer]
        own = torch.nan_to_num(qkv, 0.0, 0.0, 0.0)
        if rope is not None:
            rotated = own[:, : heads.q_size + heads.kv_size].unflatten(-1, (-1, heads.head_dim))
            self._rotation(rotated[..., : rope.rotary_dim], *part.angles[rope]).apply()
        if len(part.slots):
            self._layers[layer].append(part.slots, own[part.stored, heads.q_size :])
        log_sums = log_sums_of(qkv, heads.q_size, heads.num_heads)
        if not part.num_keys:
            out.zero_()
            log_sums.fill_(float("-inf"))
            return
        blocks = own.new_empty(len(part.blocks), self._block_size * 2 * heads.kv_size)
        self._layers[layer].gather(part.blocks, blocks)
        stored = blocks.view(-1, 2 * heads.num_kv_heads, heads.head_dim)[: part.num_keys].transpose(0, 1).float()
        keys, values = stored.split(heads.num_kv_heads)  # [num_kv_heads, num_keys, head_dim]
        query = own[:, : heads.q_size].float().view(len(own), heads.num_kv_heads, -1, heads.head_dim)
        query *= self._config.attention.scale or heads.head_dim**-0.5
        places = torch.arange(part.num_keys, device=self._device)
        num_rows = max(1, _MOST_SCORES // (heads.num_heads * part.num_keys))
        for first in range(0, len(own), num_rows):
            rows = slice(first, first + num_rows)
            scores = torch.einsum("rkgd,knd->rkgn", query[rows], keys)
            is_hidden = places > part.last_keys[rows, None]
            scores.masked_fill_(is_hidden[:, None, None], float("-inf"))
            sums = scores.logsumexp(-1, keepdim=True)
            weights = torch.nan_to_num(scores.sub_(sums).exp_(), 0.0)  # without any key the sum is -inf
            out[rows] = torch.einsum("rkgn,knd->rkgd", weights, values).flatten(1).to(out.dtype)
            log_sums[rows] = sums.flatten(1)
