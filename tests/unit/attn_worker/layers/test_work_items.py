"""Items of GPU work cover every visible key exactly once for any lengths, and always fit their array."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.attn_worker.layers.mha.work_items import (
    NO_ITEM,
    NUM_FIELDS,
    ChunkRows,
    DecodeRows,
    chunk_items,
    fill_decode_items,
    prefill_items,
)


def make_items(
    lengths: list[int], window: int | None, num_pieces: int, tile: int
) -> tuple[np.ndarray, DecodeRows]:
    """The items of one step, and the rows that they are made from."""
    context_lens = np.array(lengths, np.int32)
    num_rows = len(lengths)
    rows = DecodeRows(
        rows=np.arange(num_rows, dtype=np.int32),
        context_lens=context_lens,
        table_starts=np.arange(0, 1000 * num_rows, 1000, dtype=np.int32),
        slots=np.arange(100, 100 + num_rows, dtype=np.int32),
        angle_rows=np.maximum(context_lens - 1, 0),
    )
    items = np.full((num_rows + num_pieces, NUM_FIELDS), 77, np.int32)
    fill_decode_items(items, rows, window, num_pieces, tile)
    return items, rows


@given(
    lengths=st.lists(st.integers(0, 3000), min_size=1, max_size=12),
    window=st.none() | st.integers(1, 3000),
    num_pieces=st.integers(1, 40),
    tile=st.sampled_from([16, 32, 64]),
)
def test_items_partition_the_visible_keys(
    lengths: list[int], window: int | None, num_pieces: int, tile: int
) -> None:
    items, rows = make_items(lengths, window, num_pieces, tile)
    used = items[items[:, 0] != NO_ITEM]
    assert (items[len(used) :, 0] == NO_ITEM).all()
    for row, length in enumerate(lengths):
        own = np.flatnonzero(used[:, 0] == row)
        assert (np.diff(own) == 1).all() and (used[own, 4] == own[0]).all()
        _, table_start, first, end, _, num_items, slot, angle_row = used[own, :NUM_FIELDS].T
        assert (table_start == rows.table_starts[row]).all() and (angle_row == rows.angle_rows[row]).all()
        if length == 0:
            assert len(own) == 1 and num_items[0] == 0
            continue
        assert (num_items == len(own)).all()
        # The pieces are consecutive. The last one also has the new token, which is not read from the cache.
        lowest = 0 if window is None else max(0, length - window)
        assert [first[0], *end] == [lowest, *first[1:], length - 1]
        assert slot.tolist() == [-1] * (len(own) - 1) + [rows.slots[row]]


@given(
    lengths=st.lists(st.integers(1, 3000), min_size=1, max_size=12),
    window=st.none() | st.integers(1, 3000),
    most=st.integers(12, 60),
    tile=st.sampled_from([16, 32, 64]),
)
def test_pieces_leave_room_for_what_each_row_rounds_up(
    lengths: list[int], window: int | None, most: int, tile: int
) -> None:
    """So that the programs of few rows, of which `most` items run at once, need no second turn."""
    items, _ = make_items(lengths, window, most - len(lengths) + 1, tile)
    assert (items[:, 0] != NO_ITEM).sum() <= most


@pytest.mark.parametrize(("num_rows", "most"), [(16, 49), (12, 49), (4, 12), (3, 12), (1, 12)])
def test_equal_rows_have_as_many_pieces_each_as_fit(num_rows: int, most: int) -> None:
    items, _ = make_items([7900] * num_rows, None, most - num_rows + 1, tile=64)
    used = items[items[:, 0] != NO_ITEM]
    assert (used[:, 5] == most // num_rows).all()


def test_equal_sequences_are_not_split_if_there_are_enough() -> None:
    items, _ = make_items([1000] * 20, None, num_pieces=16, tile=32)
    assert (items[:, 0] != NO_ITEM).sum() == 20


def test_one_long_sequence_among_short_ones_is_split_and_comes_first() -> None:
    items, _ = make_items([100] * 19 + [9000], None, num_pieces=10, tile=32)
    used = items[items[:, 0] != NO_ITEM]
    assert used[0, 0] == 19 and used[0, 5] >= 8


@pytest.mark.parametrize("block_m", [16, 64])
def test_prefill_items_contain_each_query_once(block_m: int) -> None:
    num_tokens, context_lens = np.array([1, 64, 200, 17]), np.array([1, 64, 900, 40])
    first_rows, table_starts = np.array([5, 6, 70, 270]), np.array([0, 10, 20, 30])
    items = prefill_items(ChunkRows(first_rows, num_tokens, context_lens, table_starts), block_m)
    assert (items[:, 1] <= block_m).all() and (np.diff(items[:, 2]) <= 0).all()
    covered = [
        (row, position, table)
        for first_row, count, first_position, table in items[:, :4].tolist()
        for row, position in zip(
            range(first_row, first_row + count), range(first_position, 10**6), strict=False
        )
    ]
    expected = [
        (
            int(first_rows[seq] + index),
            int(context_lens[seq] - num_tokens[seq] + index),
            int(table_starts[seq]),
        )
        for seq in range(4)
        for index in range(num_tokens[seq])
    ]
    assert sorted(covered) == expected


def test_a_span_of_which_the_step_lacks_the_end_is_a_bug_and_reads_no_other_keys() -> None:
    """A picture's tokens see each other: a chunk that ends within one would read blocks that nobody has written."""
    chunks = ChunkRows(np.array([0, 4]), np.array([4, 20]), np.array([4, 50]), np.array([0, 10]))
    num_later = np.zeros(24, np.int32)
    num_later[10:20] = np.arange(10)[::-1]  # of a span that ends with row 19
    items = prefill_items(chunks, 16, num_later)
    assert items[np.argsort(items[:, 0]), 4].tolist() == [4, 46, 50]
    num_later[10:24] = np.arange(14)[::-1] + 1  # one more than the chunk has
    with pytest.raises(AssertionError, match="spans are whole"):
        prefill_items(chunks, 16, num_later)


@given(
    chunks=st.lists(st.tuples(st.integers(1, 64), st.integers(0, 5000)), min_size=1, max_size=8),
    window=st.none() | st.integers(1, 3000),
    block_m=st.sampled_from([1, 4, 16, 64]),
    num_pieces=st.integers(1, 40),
    tile=st.sampled_from([16, 32, 64]),
)
def test_chunk_items_cover_the_keys_that_each_row_sees(
    chunks: list[tuple[int, int]], window: int | None, block_m: int, num_pieces: int, tile: int
) -> None:
    num_tokens, contexts = np.array(chunks).T
    first_rows, tables = np.cumsum(num_tokens) - num_tokens, np.arange(len(chunks)) * 1000
    items = chunk_items(
        ChunkRows(first_rows, num_tokens, contexts + num_tokens, tables), window, block_m, num_pieces, 4 * tile, tile
    )
    assert len(items) <= num_tokens.sum() + num_pieces
    is_split = items[:, 7] > 1
    assert is_split.sum() <= num_pieces and (np.diff(is_split.astype(int)) <= 0).all()
    rows: list[int] = []
    for first_item in sorted(set(items[:, 6].tolist())):
        own = np.flatnonzero(items[:, 6] == first_item)
        assert own.tolist() == list(range(first_item, first_item + len(own))) and (items[own, 7] == len(own)).all()
        row, count, position, table = items[first_item, :4].tolist()
        assert 1 <= count <= block_m and (items[own, :4] == items[first_item, :4]).all()
        starts, ends = items[own, 4], items[own, 5]
        lowest = 0 if window is None else max(0, position - window + 1)
        assert starts[0] == lowest // tile * tile and ends[-1] == position + count
        assert (starts[1:] == ends[:-1]).all() and (starts % tile == 0).all() and (starts < ends).all()
        seq = table // 1000
        assert position == contexts[seq] + row - first_rows[seq]
        rows += range(row, row + count)
    assert sorted(rows) == list(range(num_tokens.sum()))


def test_a_short_chunk_behind_a_long_context_fills_the_pieces() -> None:
    chunks = ChunkRows(np.array([0]), np.array([48]), np.array([8048]), np.array([0]))
    items = chunk_items(chunks, None, 64, num_pieces=9, min_piece=256, tile=64)
    assert len(items) == 9 and (items[:, 5] - items[:, 4]).max() <= 960
