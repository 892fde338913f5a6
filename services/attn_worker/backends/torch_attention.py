"""Paged attention in plain torch operations: the default on a CPU and the reference for every kernel.

All sequences of a step are processed together: their blocks are gathered, padded and masked. `begin_step` prepares
everything that depends on the step but not on the layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from services.attn_worker.backends.padded_groups import PaddedGroup, build_padded_groups
from services.attn_worker.backends.rope import RotaryEmbedding
from services.attn_worker.cache.spec import KVCacheSpec
from services.attn_worker.runner.step_metadata import StepMetadata
from services.common.errors import ConfigError
from services.common.model_config import ModelConfig

_CACHE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class _Group:
    """A padded group on the device; keys and values are views of the gathered blocks."""

    rows: slice | torch.Tensor  # of qkv: one slice, or int64 [group_size * max_tokens]
    valid: torch.Tensor | None  # int64, indexes of the unpadded `rows`; None: all
    out_rows: torch.Tensor | None  # int64, their rows in out; None: the slice `rows`
    max_tokens: int
    blocks: torch.Tensor  # int64 [group_size * blocks per sequence]
    gathered: torch.Tensor  # [len(blocks), block_size * 2 * kv_size]
    keys: torch.Tensor  # [group_size, num_kv_heads, max_context, head_dim]
    values: torch.Tensor
    masks: dict[int | None, torch.Tensor | None]  # by window; see _masks


class TorchAttention:
    """An AttentionBackend for any torch device, in float32, bfloat16 or float16.

    The cache holds the k heads and v heads of a token side by side (`KVCacheSpec.token_major_shape`), so that one copy
    appends both and one gather reads both. Its dtype may be another of these three than the model's.
    """

    def __init__(
        self,
        config: ModelConfig,
        spec: KVCacheSpec,
        dtype: torch.dtype,
        device: torch.device,
        max_model_len: int,
    ) -> None:
        """Raises CapacityError if memory is too small, ConfigError for a cache of a dtype that is none of these."""
        if spec.dtype not in _CACHE_DTYPES:
            raise ConfigError(f"the torch backend stores float32, bfloat16 or float16, this KV cache is {spec.dtype}")
        self._config = config
        self._spec = spec
        self._block_size = spec.block_size
        self._dtype = dtype
        self._device = device
        self._rope = RotaryEmbedding(config.rope, max_model_len, device)
        self._windows = set(spec.windows)
        self._is_converted = spec.dtype != dtype
        self._cache = spec.allocate(spec.token_major_shape, device)
        self._cache_blocks = [layer.flatten(1) for layer in self._cache]  # [num_blocks + 1, block_size * 2 * kv_size]
        self._cache_slots = [layer.view(-1, 2 * spec.kv_size) for layer in self._cache]
        self._workspaces: dict[str, torch.Tensor] = {}

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copies each block in all layers with one operation."""
        for source, target in copies:
            self._cache[:, target].copy_(self._cache[:, source])

    def begin_step(self, step: StepMetadata) -> None:
        """Computes the angles, slots, gather indices and masks of the step."""
        config, num_rows = self._config, len(step.positions)
        cos, sin = self._rope(self._to_device(step.positions), self._to_device(step.rope_lens))
        cos, sin = cos[:, None].to(self._dtype), sin[:, None].to(self._dtype)
        self._cos = torch.cat((cos, cos), dim=-1)  # [num_rows, 1, rotary_dim]
        self._sin = torch.cat((-sin, sin), dim=-1)
        self._slots = self._to_device(step.slot_mapping)

        self._qkv = self._workspace("qkv", num_rows, config.qkv_size)
        self._query = self._qkv[:, : config.attn_size]
        self._key_value = self._qkv[:, config.attn_size :]
        rotated = self._qkv[:, : config.attn_size + config.kv_size].unflatten(-1, (-1, config.head_dim))
        self._rotated = rotated[..., : config.rope.rotary_dim]  # the q and k heads
        first_half, second_half = self._rotated.chunk(2, dim=-1)
        self._swapped_halves = (second_half, first_half)

        groups = build_padded_groups(step.num_tokens, step.context_lens)
        self._groups = [self._prepare(group, step.block_tables) for group in groups]

    def forward(self, layer: int, qkv: torch.Tensor, out: torch.Tensor) -> None:
        """Rotates, appends and attends with torch operations."""
        # This copy has no NaN or infinity. In the cache they would spread through the masked padding to every sequence
        # that later owns the block. The dense stroke's residual still carries them.
        torch.nan_to_num(qkv, 0.0, 0.0, 0.0, out=self._qkv)
        swapped = torch.cat(self._swapped_halves, dim=-1)
        self._rotated.mul_(self._cos).addcmul_(swapped, self._sin)
        key_value = self._key_value
        if self._is_converted:
            key_value = key_value.to(self._spec.dtype).nan_to_num_()  # what is beyond its range becomes its largest
        self._cache_slots[layer].index_copy_(0, self._slots, key_value)
        for group in self._groups:
            self._attend(layer, group, out)

    def _attend(self, layer: int, group: _Group, out: torch.Tensor) -> None:
        if self._is_converted:
            group.gathered.copy_(self._cache_blocks[layer].index_select(0, group.blocks))
        else:
            torch.index_select(self._cache_blocks[layer], 0, group.blocks, out=group.gathered)
        mask = group.masks[self._spec.windows[layer]]
        is_slice = group.out_rows is None
        query = self._query[group.rows] if is_slice else self._query.index_select(0, group.rows)
        group_size, num_kv_heads, _, head_dim = group.keys.shape
        if group.max_tokens == 1:
            # The q heads of a kv head are passed as query positions, so keys and values need not be repeated.
            query = query.view(group_size, num_kv_heads, -1, head_dim)
            attended = scaled_dot_product_attention(query, group.keys, group.values, attn_mask=mask)
        else:
            query = query.view(group_size, group.max_tokens, -1, head_dim).transpose(1, 2)
            attended = scaled_dot_product_attention(
                query,
                group.keys,
                group.values,
                attn_mask=mask,
                is_causal=mask is None,
                enable_gqa=query.shape[1] > num_kv_heads,
            ).transpose(1, 2)
        if is_slice:
            out[group.rows].view(attended.shape).copy_(attended)
        else:
            attended = attended.reshape(-1, out.shape[1])
            if group.valid is not None:
                attended = attended.index_select(0, group.valid)
            out.index_copy_(0, group.out_rows, attended)

    def _prepare(self, group: PaddedGroup, block_tables: np.ndarray) -> _Group:
        config, (group_size, max_tokens) = self._config, group.rows.shape
        num_blocks = -(-group.max_context // self._block_size)
        gathered = self._workspace("gathered", group_size * num_blocks, self._cache_blocks[0].shape[1])
        heads = gathered.view(group_size, num_blocks * self._block_size, -1, config.head_dim)
        heads = heads[:, : group.max_context].transpose(1, 2)
        if group.has_consecutive_rows:
            first_row = int(group.rows[0, 0])
            rows, valid, out_rows = slice(first_row, first_row + group.rows.size), None, None
        else:
            is_valid = group.is_valid.ravel()
            rows = self._to_device(group.rows.ravel())
            valid = None if is_valid.all() else self._to_device(np.flatnonzero(is_valid))
            out_rows = self._to_device(group.rows[group.is_valid])
        return _Group(
            rows=rows,
            valid=valid,
            out_rows=out_rows,
            max_tokens=max_tokens,
            blocks=self._to_device(block_tables[group.seqs, :num_blocks].ravel()),
            gathered=gathered,
            keys=heads[:, : config.num_kv_heads],
            values=heads[:, config.num_kv_heads :],
            masks=self._masks(group),
        )

    def _masks(self, group: PaddedGroup) -> dict[int | None, torch.Tensor | None]:
        """The mask to add to the scores, [group_size, 1, max_tokens, max_context], by distinct window.

        None if a single token sees everything, or if a first chunk only needs the causal triangle.
        """
        is_unpadded = bool((group.query_positions == group.max_context - 1).all())
        masks: dict[int | None, torch.Tensor | None] = {}
        for window in self._windows:
            has_window = window is not None and window < group.max_context
            if not has_window and (group.is_causal or is_unpadded):
                masks[window] = None
                continue
            queries = self._to_device(group.query_positions).int()[:, None, :, None]
            distance = queries - torch.arange(group.max_context, dtype=torch.int32, device=self._device)
            is_hidden = distance < 0
            if has_window:
                is_hidden |= distance >= window
            mask = torch.zeros(is_hidden.shape, dtype=self._dtype, device=self._device)
            masks[window] = mask.masked_fill_(is_hidden, float("-inf"))
        return masks

    def _to_device(self, array: np.ndarray) -> torch.Tensor:
        """The array as an int64 index tensor on the device."""
        return torch.from_numpy(array).to(self._device, torch.int64)

    def _workspace(self, name: str, num_rows: int, num_columns: int) -> torch.Tensor:
        """An uninitialised tensor [num_rows, num_columns], reused in every step: new memory is slow at first."""
        buffer = self._workspaces.get(name)
        if buffer is None or len(buffer) < num_rows:
            buffer = torch.empty(num_rows * 3 // 2, num_columns, dtype=self._dtype, device=self._device)
            self._workspaces[name] = buffer
        return buffer[:num_rows]
