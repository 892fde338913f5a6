"""`BatchInvariantTorchAttention`: attention on a CPU whose rows do not depend on the step to the last bit.

All products have a constant shape: `_ROWS` queries of one sequence and kv head by one *piece* of keys. Pieces begin at
fixed positions of the text, wherever a chunk, a cached prefix or a window begins, and a query adds up its pieces in
their order (the running softmax of FlashAttention, arXiv:2205.14135). A piece of which a query sees no key changes none
of its bits. Products of one shape give an element the same bits however many of them one call computes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from services.attn_worker.cache.step_metadata import StepMetadata
from services.attn_worker.layers.mha.torch_attention import TorchAttention

_ROWS = 16  # queries of a product; heads of a group and tokens, padded
_KEYS = 64  # at least, of a piece, which consists of whole blocks
_TILES_AT_A_TIME = 64  # tiles whose pieces are gathered together


@dataclass(frozen=True, slots=True)
class _Tiles:
    """Up to `_ROWS` queries each, of tokens next to each other in a sequence: those with most pieces first."""

    rows: torch.Tensor  # int64 [num_tiles, tokens], of qkv; padding repeats the last one
    is_valid: torch.Tensor  # bool [num_tiles, tokens]
    positions: torch.Tensor  # int64 [num_tiles, tokens], in the text
    blocks: list[torch.Tensor]  # int64 [tiles that have it, blocks of a piece], by number of the piece in its tile
    first_keys: list[torch.Tensor]  # int64 [tiles that have it], the positions where these pieces begin


@dataclass(frozen=True, slots=True)
class _TiledPart:
    """A step in the blocks of one group of layers."""

    slots: torch.Tensor  # int64 [num_rows]
    tiles: dict[tuple[int, int | None], list[_Tiles]]  # by tokens of a tile, and by window


class BatchInvariantTorchAttention(TorchAttention):
    """A TorchAttention with one order of additions. It has no sinks of StreamingLLM and no latent vectors."""

    def _attend(self, layer: int, part: _TiledPart, query: torch.Tensor, out: torch.Tensor) -> None:
        heads, window = self._config.layer_heads[layer], self._spec.windows[layer]
        for tiles in part.tiles[_tokens_of_tile(heads.num_heads // heads.num_kv_heads), window]:
            attended = self._attend_tiles(layer, tiles, query, window)
            out.index_copy_(0, tiles.rows[tiles.is_valid], attended[tiles.is_valid].flatten(1).to(out.dtype))

    def _attend_tiles(self, layer: int, tiles: _Tiles, query: torch.Tensor, window: int | None) -> torch.Tensor:
        """The running softmax over the pieces of all tiles -> float32 [num_tiles, tokens, num_heads, head_dim]."""
        options, heads = self._config.attention, self._config.layer_heads[layer]
        num_tiles, num_tokens = tiles.rows.shape
        num_kv_heads, head_dim = heads.num_kv_heads, heads.head_dim
        # [tiles, kv heads, tokens * heads of a group, head_dim], padded to a constant number of rows
        queries = query[tiles.rows].float().view(num_tiles, num_tokens, num_kv_heads, -1, head_dim)
        group = queries.shape[3]
        queries = queries.transpose(1, 2).flatten(2, 3)
        num_rows = max(_ROWS, num_tokens * group)
        padded = queries.new_zeros(num_tiles, num_kv_heads, num_rows, head_dim)
        padded[:, :, : num_tokens * group] = queries
        positions = tiles.positions.new_zeros(num_tiles, num_rows)
        positions[:, : num_tokens * group] = tiles.positions.repeat_interleave(group, dim=1)
        slopes = self._head_rows(self._slopes, num_kv_heads, num_tokens, num_rows) if len(self._slopes) else None

        highest = padded.new_full((num_tiles, num_kv_heads, num_rows, 1), float("-inf"))
        total, acc = torch.zeros_like(highest), torch.zeros_like(padded)
        for blocks, first_keys in zip(tiles.blocks, tiles.first_keys, strict=True):
            active = slice(len(blocks))  # tiles with the most pieces come first
            keys, values = self._gather(layer, blocks)
            scores = (padded[active] @ keys.transpose(-1, -2)) * (options.scale or head_dim**-0.5)
            if options.softcap is not None:
                scores = torch.tanh(scores / options.softcap) * options.softcap
            key_positions = first_keys[:, None] + torch.arange(keys.shape[2], device=self._device)
            distance = (positions[active, :, None] - key_positions[:, None, :])[:, None]
            if slopes is not None:
                scores = scores - slopes * distance
            is_hidden = distance < 0
            if window is not None:
                is_hidden |= distance >= window
            is_hidden |= key_positions[:, None, None, :] < 0
            scores = scores.masked_fill_(is_hidden, float("-inf"))
            new_highest = torch.maximum(highest[active], scores.amax(dim=-1, keepdim=True))
            # Rows that have seen nothing yet keep -inf; subtracting it from itself would be NaN.
            offset = new_highest.masked_fill(new_highest == float("-inf"), 0.0)
            weights = scores.sub_(offset).exp_()
            decay = (highest[active] - offset).exp_()
            total[active] = total[active] * decay + weights.sum(dim=-1, keepdim=True)
            acc[active] = acc[active] * decay + weights @ values
            highest[active] = new_highest
        if options.has_sinks:
            sinks = self._head_rows(self._sinks[layer], num_kv_heads, num_tokens, num_rows)
            new_highest = torch.maximum(highest, sinks)
            decay = (highest - new_highest).exp_()
            total, acc = total * decay + (sinks - new_highest).exp_(), acc * decay
        attended = (acc / total)[:, :, : num_tokens * group]
        attended = attended.unflatten(2, (num_tokens, group)).transpose(1, 2)
        return attended.flatten(2, 3)

    def _gather(self, layer: int, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of pieces, float32 [num_pieces, num_kv_heads, keys of a piece, head_dim]."""
        heads = self._config.layer_heads[layer]
        shape = (len(blocks), -1, 2 * heads.num_kv_heads, heads.head_dim)
        gathered = torch.empty(
            blocks.numel(), self._block_size * shape[2] * shape[3], dtype=self._dtype, device=self._device
        )
        self._layers[layer].gather(blocks.flatten(), gathered)
        keys, values = gathered.view(shape).transpose(1, 2).float().split(heads.num_kv_heads, dim=1)
        return keys.contiguous(), values.contiguous()

    def _prepare_part(self, group: int, step: StepMetadata, num_later: np.ndarray | None) -> _TiledPart:
        assert num_later is None or not num_later.any(), "pictures are refused"
        windows, kinds = self._group_options[group]
        sizes = {_tokens_of_tile(self._kinds[kind].num_heads // self._kinds[kind].num_kv_heads) for kind in kinds}
        tiles = {
            (size, window): self._prepare_tiles(step, size, window, self._spec.num_blocks_of(group))
            for size in sizes
            for window in windows
        }
        return _TiledPart(self._to_device(step.slot_mapping), tiles)

    def _prepare_tiles(self, step: StepMetadata, size: int, window: int | None, null_block: int) -> list[_Tiles]:
        """`null_block` stands for blocks of a piece that are dropped or not allocated."""
        num_tokens = step.num_tokens.astype(np.int64)
        first_rows = np.cumsum(num_tokens) - num_tokens
        counts = -(-num_tokens // size)
        owners = np.repeat(np.arange(len(counts)), counts)
        starts = (np.arange(len(owners)) - (np.cumsum(counts) - counts)[owners]) * size
        offsets = starts[:, None] + np.arange(size)
        is_valid = offsets < num_tokens[owners, None]
        rows = first_rows[owners, None] + np.minimum(offsets, num_tokens[owners, None] - 1)
        positions = step.positions[rows].astype(np.int64)

        piece_blocks = -(-_KEYS // self._block_size)
        piece_size = piece_blocks * self._block_size
        lowest = positions[:, 0] if window is None else np.maximum(positions[:, 0] - window + 1, 0)
        first_pieces = np.zeros_like(lowest) if window is None else lowest // piece_size
        num_pieces = positions[:, -1] // piece_size + 1 - first_pieces
        order = np.argsort(-num_pieces, kind="stable")
        # A sequence may have dropped its first blocks: then its table begins later.
        last_rows = first_rows + num_tokens - 1
        num_dropped = (step.positions[last_rows] + 1 - step.context_lens) // self._block_size
        width = step.block_tables.shape[1]
        result = []
        for start in range(0, len(order), _TILES_AT_A_TIME):
            chosen = order[start : start + _TILES_AT_A_TIME]
            blocks, first_keys = [], []
            for index in range(int(num_pieces[chosen[0]])):
                active = chosen[num_pieces[chosen] > index]
                pieces = first_pieces[active] + index
                of_text = pieces[:, None] * piece_blocks + np.arange(piece_blocks)
                columns = of_text - num_dropped[owners[active], None]
                is_there = (columns >= 0) & (columns < width)
                found = step.block_tables[owners[active, None], np.clip(columns, 0, width - 1)]
                blocks.append(self._to_device(np.where(is_there, found, null_block)))
                first_keys.append(self._to_device(pieces * piece_size))
            result.append(
                _Tiles(
                    self._to_device(rows[chosen]),
                    torch.from_numpy(is_valid[chosen]).to(self._device),
                    self._to_device(positions[chosen]),
                    blocks,
                    first_keys,
                )
            )
        return result

    def _head_rows(
        self, of_heads: torch.Tensor, num_kv_heads: int, num_tokens: int, num_rows: int
    ) -> torch.Tensor:
        """A number for each head, [num_heads] -> that of each row of a tile, [num_kv_heads, num_rows, 1]."""
        of_rows = of_heads.view(num_kv_heads, -1).repeat(1, num_tokens)
        padded = of_rows.new_zeros(num_kv_heads, num_rows)
        padded[:, : of_rows.shape[1]] = of_rows
        return padded[:, :, None]


def _tokens_of_tile(group: int) -> int:
    """How many tokens' queries of a kv head, `group` each, one product has."""
    return max(_ROWS // group, 1)
