"""Splits the attention of a step into items: tiles of rows, with all of their pieces or with one. Plain numpy.

An *item* is a row of int32 that tells one kernel program its work. Columns: first row, number of tokens, position of
the first token in the text, where the block table of the text begins (before the flat tables if blocks were dropped),
first piece, the one after the last, first item of these rows, number of their items (0: padding, whose output is zero).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from services.attn_worker.layers.mha.work_items import NO_ITEM


@dataclass(frozen=True, slots=True)
class TextRows:
    """The chunks of some sequences in a step; integer arrays [num_seqs]."""

    first_rows: np.ndarray  # rows of qkv and out
    num_tokens: np.ndarray
    positions: np.ndarray  # in the text, of the first tokens
    table_starts: np.ndarray  # index in the flat tables of the block of position 0, which may have been dropped

    def select(self, is_selected: np.ndarray) -> TextRows:
        """The chunks where `is_selected`, bool [num_seqs], is true."""
        columns = (self.first_rows, self.num_tokens, self.positions, self.table_starts)
        return TextRows(*(column[is_selected] for column in columns))


def fill_items(
    items: np.ndarray,
    rows: TextRows,
    num_rows: int,
    num_padding: int,
    window: int | None,
    size: int,
    piece: int,
    num_extra: int,
) -> None:
    """Writes items of up to `size` tokens into `items`, int32 [num_items, NUM_FIELDS]; the rest becomes NO_ITEM.

    `num_padding` rows behind the `num_rows` of the step get an item each. Tiles with most pieces are split first, as
    long as that makes at most `num_extra` items more. Split tiles, and long ones, come first.
    """
    counts = -(-rows.num_tokens // size)
    owners = np.repeat(np.arange(len(counts)), counts)
    starts = (np.arange(len(owners)) - (np.cumsum(counts) - counts)[owners]) * size
    num_tokens = np.minimum(rows.num_tokens[owners] - starts, size)
    positions = rows.positions[owners] + starts
    lowest = np.zeros_like(positions) if window is None else np.maximum(positions - window + 1, 0)
    first_pieces = lowest // piece
    end_pieces = (positions + num_tokens - 1) // piece + 1
    num_pieces = end_pieces - first_pieces

    order = np.argsort(-num_pieces, kind="stable")
    is_split = np.cumsum(num_pieces[order] - 1) <= num_extra
    ordered = np.where(is_split, num_pieces[order], 1)
    of_items = np.repeat(order, ordered)
    first_items = np.repeat(np.cumsum(ordered) - ordered, ordered)
    is_single = np.repeat(is_split, ordered)
    firsts = first_pieces[of_items] + np.arange(len(of_items)) - first_items
    num_items = len(of_items)
    used = items[:num_items]
    used[:, 0] = rows.first_rows[owners][of_items] + starts[of_items]
    used[:, 1] = num_tokens[of_items]
    used[:, 2] = positions[of_items]
    used[:, 3] = rows.table_starts[owners][of_items]
    used[:, 4] = firsts
    used[:, 5] = np.where(is_single, firsts + 1, end_pieces[of_items])
    used[:, 6] = first_items
    used[:, 7] = np.repeat(ordered, ordered)
    padding = items[num_items : num_items + num_padding]
    padding[:] = 0
    padding[:, 0] = np.arange(num_rows, num_rows + num_padding)
    padding[:, 1] = 1
    items[num_items + num_padding :, 0] = NO_ITEM
