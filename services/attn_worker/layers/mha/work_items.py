"""Splits the attention of one step into equal pieces of GPU work. Plain numpy, once per step.

An *item* is a row of int32 that tells one kernel program its work. This module fixes the order of the columns, which
the kernels of `triton_decode.py`, `triton_prefill.py` and `triton_short_chunks.py` read.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

NUM_FIELDS = 8  # int32 columns of an item
NO_ITEM = -1  # in the first column: the item has no work

_MIN_PIECE = 64  # keys; smaller pieces cost more in merging than they gain
_MAX_PIECES = 32  # of one block of queries in a short chunk, which one program merges


@dataclass(frozen=True, slots=True)
class ChunkRows:
    """The chunks of some sequences in the step; integer arrays [num_seqs]."""

    first_rows: np.ndarray  # rows of qkv and out
    num_tokens: np.ndarray
    context_lens: np.ndarray  # including this step's tokens
    table_starts: np.ndarray  # index of the sequence's first block in the flat block tables

    def select(self, is_selected: np.ndarray) -> ChunkRows:
        """The chunks where `is_selected`, bool [num_seqs], is true."""
        columns = (self.first_rows, self.num_tokens, self.context_lens, self.table_starts)
        return ChunkRows(*(column[is_selected] for column in columns))


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """The sequences that have one token in the step; integer arrays [num_rows]."""

    rows: np.ndarray  # rows of qkv and out
    context_lens: np.ndarray  # including the new token; 0: a padding row, whose output becomes zero
    table_starts: np.ndarray  # index of the sequence's first block in the flat block tables
    slots: np.ndarray  # slots for the new key and value
    angle_rows: np.ndarray  # rows in the table of angles


def fill_decode_items(
    items: np.ndarray, decode: DecodeRows, window: int | None, num_pieces: int, tile: int, *, appends: bool = True
) -> None:
    """Writes the pieces of all rows into `items`, int32 [>= num_rows + num_pieces, NUM_FIELDS].

    Not `appends`: an earlier layer has stored the new token's key and value, and they are cached as all others.

    Columns: row, table_start, first key, end of the cached keys, first item of the row, number of items of the row (0:
    padding), slot of the new token (-1 if another item has it), angle row. A piece consists of whole tiles, except the
    last piece of a row, and has about total / num_pieces keys; there are at most num_pieces + num_rows - 1 with work.
    Long pieces come first, so that the GPU does not wait for them at the end. The rest of `items` becomes NO_ITEM.
    """
    ends = decode.context_lens
    first_keys = np.zeros_like(ends) if window is None else np.maximum(ends - window, 0)
    first_tiles = first_keys // tile * tile
    lengths = ends - first_tiles
    piece = max(_MIN_PIECE, -(-int(lengths.sum()) // num_pieces))
    counts = -(-lengths // piece)
    sizes = -(-lengths // np.maximum(counts * tile, 1)) * tile
    counts = np.maximum(-(-lengths // np.maximum(sizes, 1)), 1)

    order = (-sizes).argsort(kind="stable")
    ordered_counts = counts[order]
    num_items = int(ordered_counts.sum())
    ordered_firsts = ordered_counts.cumsum() - ordered_counts
    owners = order.repeat(ordered_counts)
    firsts = ordered_firsts.repeat(ordered_counts)
    indices = np.arange(num_items)
    tiles = first_tiles[owners] + (indices - firsts) * sizes[owners]
    owner_ends = ends[owners]
    stops = np.minimum(tiles + sizes[owners], owner_ends)
    is_last = stops == owner_ends

    used = items[:num_items]
    used[:, 0] = decode.rows[owners]
    used[:, 1] = decode.table_starts[owners]
    used[:, 2] = np.maximum(tiles, first_keys[owners])
    used[:, 3] = stops - is_last if appends else stops
    used[:, 4] = firsts
    used[:, 5] = (counts * (lengths > 0))[owners]
    used[:, 6] = np.where(is_last & appends, decode.slots[owners], -1)
    used[:, 7] = decode.angle_rows[owners]
    items[num_items:, 0] = NO_ITEM


def chunk_items(
    chunks: ChunkRows, window: int | None, block_m: int, num_pieces: int, min_piece: int, tile: int
) -> np.ndarray:
    """Items of up to `block_m` tokens of one sequence and a piece of their keys, int32 [num_items, NUM_FIELDS].

    Columns: first row, number of rows, position of the first row, table_start, first key, end of the keys, first item
    of these rows, number of their items. A piece has at least `min_piece` keys and consists of whole tiles, except the
    last one. First come rows with several pieces, at most `num_pieces` items, and long pieces before short ones.
    """
    tokens = _token_blocks(chunks, block_m)
    positions = tokens.context_lens - tokens.num_tokens
    lowest = np.zeros_like(positions) if window is None else np.maximum(positions - window + 1, 0)
    first_tiles = lowest // tile * tile
    lengths = (tokens.context_lens - first_tiles).astype(np.int64)
    # Rounded down: programs beyond those that run at a time would begin when others end, and take as long again.
    shares = lengths * num_pieces // max(int(lengths.sum()), 1)
    counts = np.clip(np.minimum(shares, lengths // min_piece), 1, _MAX_PIECES)
    sizes = -(-lengths // (counts * tile)) * tile
    num_items = -(-lengths // sizes)

    order = np.lexsort((-sizes, num_items == 1))
    ordered = num_items[order]
    owners = order.repeat(ordered)
    first_items = (ordered.cumsum() - ordered).repeat(ordered)
    starts = first_tiles[owners] + (np.arange(len(owners)) - first_items) * sizes[owners]
    items = np.empty((len(owners), NUM_FIELDS), np.int32)
    items[:, 0] = tokens.first_rows[owners]
    items[:, 1] = tokens.num_tokens[owners]
    items[:, 2] = positions[owners]
    items[:, 3] = tokens.table_starts[owners]
    items[:, 4] = starts
    items[:, 5] = np.minimum(starts + sizes[owners], tokens.context_lens[owners])
    items[:, 6] = first_items
    items[:, 7] = num_items[owners]
    return items


def prefill_items(chunks: ChunkRows, block_m: int, num_later: np.ndarray | None = None) -> np.ndarray:
    """Items of up to `block_m` queries of one sequence, int32 [num_items, NUM_FIELDS], longest work first.

    Columns: first row, number of rows, position of the first row, table_start, end of the keys that the rows see with
    `num_later` (int32, by row of the step, see `StepMetadata`; None: none after their own); the others are unused.
    """
    tokens = _token_blocks(chunks, block_m)
    items = np.zeros((len(tokens.num_tokens), NUM_FIELDS), np.int32)
    items[:, 0] = tokens.first_rows
    items[:, 1] = tokens.num_tokens
    items[:, 2] = tokens.context_lens - tokens.num_tokens
    items[:, 3] = tokens.table_starts
    items[:, 4] = tokens.context_lens
    if num_later is not None:
        for item in items:
            rows = np.arange(item[1])
            item[4] = item[2] + 1 + (rows + num_later[item[0] + rows]).max()
        ends = np.repeat(chunks.context_lens, -(-chunks.num_tokens // block_m))
        assert (items[:, 4] <= ends).all(), "spans are whole: no row sees keys that the step does not write"
    return items[(-items[:, 2]).argsort(kind="stable")]


def _token_blocks(chunks: ChunkRows, block_m: int) -> ChunkRows:
    """The chunks in blocks of up to `block_m` tokens; the context of a block ends with its last token."""
    if not np.count_nonzero(chunks.num_tokens > block_m):  # as drafts are; then each is its only block
        return chunks
    counts = -(-chunks.num_tokens // block_m)
    owners = np.arange(len(counts)).repeat(counts)
    offsets = (np.arange(len(owners)) - (counts.cumsum() - counts)[owners]) * block_m
    num_tokens = np.minimum(chunks.num_tokens[owners] - offsets, block_m)
    ends = (chunks.context_lens - chunks.num_tokens)[owners] + offsets + num_tokens
    return ChunkRows(chunks.first_rows[owners] + offsets, num_tokens, ends, chunks.table_starts[owners])
