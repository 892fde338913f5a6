"""`DraftAttention`: the keys and values of what drafts, and attention to them in plain torch.

The cache is a list of slots, one for a token. A block is `BLOCK_SIZE` slots in a row, and a sequence has a table of
blocks. All positions may be known to the device alone, as they depend on how many drafts were right, and nothing waits
for the host: so this is not the attention worker's reference, whose steps the host prepares.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import scaled_dot_product_attention

from services.common.attention.rope import RotaryEmbedding
from services.common.model_config import ModelConfig, RopeConfig
from services.dense_worker.features.drafting.kv_cache.draft_blocks import BLOCK_SIZE, SPARE_BLOCK


def bytes_of_block(config: ModelConfig, dtype: torch.dtype) -> int:
    """Memory of one block, for all layers."""
    return BLOCK_SIZE * config.num_layers * 2 * config.kv_size * dtype.itemsize


@dataclass(frozen=True, slots=True)
class DraftRows:
    """What attention needs of a forward pass, the same for all layers. b sequences have r rows each."""

    slots: torch.Tensor  # int64 [b * r]: where the keys and values of the rows go
    context: torch.Tensor  # int64 [b, c]: the slots of each sequence, in the order of its tokens
    masks: dict[int | None, torch.Tensor]  # by window: added to the scores, [b, 1 or kv heads, heads of a group * r, c]
    angles: dict[RopeConfig, tuple[torch.Tensor, torch.Tensor]]  # cos and sin, [b * r, 1, rotary_dim / 2]


class DraftAttention:
    """Attention with all options but those that `load.py` refuses. Its memory is on the model's device."""

    def __init__(
        self, config: ModelConfig, num_blocks: int, max_len: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """max_len: most tokens of a sequence"""
        self._config = config
        self._dtype = dtype
        self._num_groups = config.num_heads // config.num_kv_heads
        ropes = {rope for rope in config.layer_ropes if rope is not None}
        self._ropes = {rope: RotaryEmbedding(rope, max_len, device) for rope in ropes}
        self._slopes = torch.tensor(config.attention.alibi_slopes, dtype=torch.float32, device=device)
        shape = (config.num_layers, num_blocks * BLOCK_SIZE, 2, config.num_kv_heads, config.head_dim)
        self._cache = torch.zeros(shape, dtype=dtype, device=device)

    def begin(self, positions: torch.Tensor, tables: torch.Tensor, starts: torch.Tensor | None = None) -> DraftRows:
        """Prepares a forward pass.

        positions: int64 [b, r], in the sequence, -1 for padding; tables: int64 [b, num_blocks], the blocks of each
        sequence, whose tokens may be fewer than they hold; starts: int64 [b], the position of the first token in the
        blocks, None: 0
        """
        slots_of_block = torch.arange(BLOCK_SIZE, device=tables.device)
        context = (tables[:, :, None] * BLOCK_SIZE + slots_of_block).flatten(1)
        known = positions.clamp(min=0)
        places = known if starts is None else (known - starts[:, None]).clamp(min=0)
        slots = context.gather(1, places).masked_fill(positions < 0, SPARE_BLOCK * BLOCK_SIZE).flatten()
        distance = places[:, :, None] - torch.arange(context.shape[1], device=tables.device)  # [b, r, c]
        masks = {window: self._mask(distance, window) for window in set(self._config.sliding_windows)}
        angles = {rope: self._angles(rope, known.flatten()) for rope in self._ropes}
        return DraftRows(slots, context, masks, angles)

    def store(self, layer: int, keys_values: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor) -> None:
        """Keeps keys and values, without attention.

        keys_values: [n, 2 * kv_size], not rotated, overwritten; slots, positions: int64 [n]
        """
        keys_values = keys_values.unflatten(1, (2, -1, self._config.head_dim))
        torch.nan_to_num(keys_values, 0.0, 0.0, 0.0, out=keys_values)
        rope = self._config.layer_ropes[layer]
        if rope is not None:
            rotated = keys_values[:, 0, :, : rope.rotary_dim]
            _rotate(rotated, *self._angles(rope, positions), has_pairs=self._config.attention.rotates_pairs)
        self._cache[layer].index_copy_(0, slots, keys_values)

    def forward(self, layer: int, qkv: torch.Tensor, rows: DraftRows) -> torch.Tensor:
        """qkv [b * r, qkv_size], overwritten -> attention's output [b * r, attn_size]."""
        config, options = self._config, self._config.attention
        num_seqs, num_slots = rows.context.shape
        torch.nan_to_num(qkv, 0.0, 0.0, 0.0, out=qkv)  # masked slots must not spread NaN
        heads = qkv.unflatten(1, (-1, config.head_dim))
        query, keys_values = heads.tensor_split([config.num_heads], dim=1)
        rope = config.layer_ropes[layer]
        if rope is not None:
            rotated = heads[:, : config.num_heads + config.num_kv_heads, : rope.rotary_dim]
            _rotate(rotated, *rows.angles[rope], has_pairs=options.rotates_pairs)
        cache = self._cache[layer]
        cache.index_copy_(0, rows.slots, keys_values.unflatten(1, (2, -1)))
        found = cache.index_select(0, rows.context.flatten()).view(num_seqs, num_slots, *cache.shape[1:])
        keys, values = found.permute(2, 0, 3, 1, 4)  # [b, kv heads, c, head_dim] each
        # The q heads of a kv head are passed as query positions, so that keys and values need not be repeated.
        query = query.view(num_seqs, -1, config.num_kv_heads, self._num_groups, config.head_dim)
        query = query.permute(0, 2, 3, 1, 4).flatten(2, 3)  # [b, kv heads, heads of a group * r, head_dim]
        mask = rows.masks[config.sliding_windows[layer]]
        if options.softcap is None:
            out = scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=options.scale)
        else:
            scale = config.head_dim**-0.5 if options.scale is None else options.scale
            scores = (query @ keys.transpose(2, 3)).float() * scale
            scores = torch.tanh(scores / options.softcap) * options.softcap + mask
            out = scores.softmax(-1).to(values.dtype) @ values
        out = out.unflatten(2, (self._num_groups, -1)).permute(0, 3, 1, 2, 4)
        return out.reshape(len(qkv), -1)

    def _angles(self, rope: RopeConfig, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin [n, 1, rotary_dim / 2] for positions int64 [n]."""
        # Scaling by length takes the length at the token itself, so that keys stay as they are when a text grows.
        cos, sin = self._ropes[rope](positions, positions + 1)
        return cos[:, None].to(self._dtype), sin[:, None].to(self._dtype)

    def _mask(self, distance: torch.Tensor, window: int | None) -> torch.Tensor:
        """distance: int64 [b, r, c], from a row back to a slot."""
        is_hidden = distance < 0
        if window is not None:
            is_hidden |= distance >= window
        is_hidden = is_hidden[:, None, None]  # [b, kv heads, heads of a group, r, c]
        if len(self._slopes):
            slopes = self._slopes.view(1, -1, self._num_groups, 1, 1)
            mask = slopes * -distance[:, None, None]
        else:
            mask = torch.zeros(1, 1, self._num_groups, 1, 1, device=distance.device)
        return mask.masked_fill(is_hidden, -torch.inf).flatten(2, 3).to(self._dtype)


def _rotate(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, has_pairs: bool) -> None:
    """Rotates heads [n, num_heads, rotary_dim] in place; cos, sin [n, 1, rotary_dim / 2]."""
    first, second = (heads[..., 0::2], heads[..., 1::2]) if has_pairs else heads.chunk(2, dim=-1)
    turned = first * cos - second * sin
    second.copy_(second * cos + first * sin)
    first.copy_(turned)


def padded_tables(blocks: Sequence[Sequence[int]]) -> list[list[int]]:
    """The blocks of each sequence, all as many, filled up with the spare one."""
    width = max(map(len, blocks))
    return [[*each, *([SPARE_BLOCK] * (width - len(each)))] for each in blocks]
