"""Examples of two groups of layers: what sequences keep behind a window, and how many blocks that takes."""

from __future__ import annotations

import pytest

from services.attn_worker.cache.build_cache import WindowBlocks, build_cache
from services.attn_worker.cache.cached_sequence import PlannedStep
from services.attn_worker.cache.kv_cache import KVCache
from services.common.errors import CapacityError, RequestAborted
from tests.support.attention.open_now import open_sequence
from tests.support.plans import make_plan, make_window_group

BLOCK_SIZE, WINDOW = 4, 10


def make_cache(num_window_blocks: int = 40, **options: object) -> KVCache:
    return build_cache(100, BLOCK_SIZE, 200, window_blocks=WindowBlocks(WINDOW, num_window_blocks), **options)


def run(cache: KVCache, *entries: tuple[int, int, int], **options: object) -> PlannedStep:
    """Runs one step that must succeed."""
    step = cache.plan_step(make_plan(entries, **options))
    assert step.errors == {}
    cache.commit_step()
    cache.check_integrity()
    return step


def prefill(cache: KVCache, seq_id: int, num_tokens: int, first_token: int = 0) -> int:
    """Opens a sequence and computes it; returns the number of its tokens that were cached."""
    token_ids = list(range(first_token, first_token + num_tokens))
    num_cached = open_sequence(cache, seq_id, token_ids, num_tokens).num_cached_tokens
    run(cache, (seq_id, num_tokens - num_cached, num_cached))
    return num_cached


def test_the_next_plan_drops_what_no_token_after_the_committed_ones_reads_except_one_block() -> None:
    cache = make_cache()
    prefill(cache, 1, 41)
    assert (cache.num_used_blocks, cache.pools["windows"].num_used_blocks) == (11, 11)
    # Token 41 reads from token 32 on: blocks 8, 9 and 10, and one before them is kept.
    step = run(cache, (1, 1, 41))
    assert (cache.num_used_blocks, cache.pools["windows"].num_used_blocks) == (11, 4)
    assert step.num_freed_blocks == 0, "only blocks of the other layers are counted"
    assert step.metadata.context_lens.tolist() == [42] and step.metadata.block_tables.tolist() == [list(range(11))]
    windows = step.metadata.windows
    assert windows.context_lens.tolist() == [42 - 7 * BLOCK_SIZE]
    assert windows.block_tables.tolist() == [[7, 8, 9, 10]] and windows.slot_mapping.tolist() == [41]
    assert windows.positions.tolist() == step.metadata.positions.tolist() == [41]


def test_a_sequence_that_has_no_part_in_a_step_drops_blocks_all_the_same() -> None:
    cache = make_cache()
    prefill(cache, 1, 41)
    prefill(cache, 2, 5, first_token=50)
    assert cache.pools["windows"].num_used_blocks == 4 + 2


def test_a_step_that_is_lost_finds_the_blocks_of_its_first_token() -> None:
    cache = make_cache()
    prefill(cache, 1, 41)
    for position in (41, 61):  # two steps under way, each of more tokens than a window
        assert cache.plan_step(make_plan([(1, 20, position)])).errors == {}
    cache.abort_steps()
    cache.check_integrity()
    result = open_sequence(cache, 1, list(range(61)), 41)
    assert (result.num_cached_tokens, cache.num_recovered_sequences) == (41, 1)
    run(cache, (1, 20, 41))


def test_a_prefix_ends_where_the_last_window_is_still_there() -> None:
    cache = make_cache(num_window_blocks=16)
    prefill(cache, 1, 41)
    run(cache, (1, 1, 41))
    run(cache, close_seq_ids=[1])
    prefill(cache, 2, 30, first_token=100)  # takes all blocks without content, then those that were dropped first
    run(cache, close_seq_ids=[2])
    assert prefill(cache, 3, 41) == 40, "the blocks of the end were the last that became free"
    run(cache, close_seq_ids=[3])
    prefill(cache, 4, 60, first_token=200)
    run(cache, close_seq_ids=[4])
    num_cached = prefill(cache, 5, 41)
    assert num_cached < 40 <= cache.num_cached_blocks * BLOCK_SIZE, "the other layers still have all of it"


def test_a_fork_shares_both_groups_and_copies_the_partial_block_of_each() -> None:
    cache = make_cache()
    prefill(cache, 1, 41)
    run(cache, (1, 1, 41))
    used = cache.num_used_blocks, cache.pools["windows"].num_used_blocks
    step = run(cache, (2, 1, 42), forks=[(1, 2, 42)])
    assert list(map(len, step.block_copies)) == [1, 1]
    assert (cache.num_used_blocks, cache.pools["windows"].num_used_blocks) == (used[0] + 1, used[1] + 1)
    run(cache, close_seq_ids=[1])
    assert cache.pools["windows"].num_used_blocks == used[1], "the other one still reads its window"


def test_a_fork_behind_a_dropped_window_names_what_is_gone() -> None:
    cache = make_cache()
    prefill(cache, 1, 41)
    error = cache.plan_step(make_plan(forks=[(1, 2, 20)])).errors[2]
    assert isinstance(error, RequestAborted) and "at token 20: it has dropped 28 tokens" in str(error)


@pytest.mark.parametrize("num_too_few", [0, 1])
def test_a_sequence_that_lacks_blocks_of_one_group_takes_none_of_the_other(num_too_few: int) -> None:
    cache = make_cache(num_window_blocks=5 - num_too_few)
    open_sequence(cache, 1, list(range(20)), 20)
    step = cache.plan_step(make_plan([(1, 20, 0)]))
    if num_too_few:
        assert isinstance(step.errors[1], CapacityError) and "5 KV blocks are needed, 4 of 4" in str(step.errors[1])
    assert len(step.errors) == num_too_few
    assert cache.num_used_blocks == cache.pools["windows"].num_used_blocks == 5 * (not num_too_few)
    cache.check_integrity()


@pytest.mark.parametrize(("block_size", "window"), [(1, 1), (1, 7), (4, 1), (4, 10), (4, 13), (16, 20)])
def test_the_windows_of_as_many_sequences_as_may_be_open_always_have_room(block_size: int, window: int) -> None:
    """Three steps under way at a time, each full, while the sequences of a dead dense worker hold their windows."""
    max_num_seqs, max_step_tokens, length = 5, 24, 330
    group = make_window_group(window, block_size, max_num_seqs, max_step_tokens)
    cache = build_cache(5000, block_size, 400, window_blocks=group)
    most = 0
    for generation in range(3):
        seq_ids = [generation * 10 + index for index in range(max_num_seqs)]
        for seq_id in seq_ids:
            open_sequence(cache, seq_id, [seq_id] * length, length)
        positions, num_in_flight, num_planned = dict.fromkeys(seq_ids, 0), 0, 0
        while min(positions.values()) < length - max_step_tokens:
            # Alternately one sequence gets a whole step, or all get a part of it.
            chosen = [seq_ids[num_planned // 2 % max_num_seqs]] if num_planned % 2 else seq_ids
            share = max_step_tokens // len(chosen)
            entries = [(each, min(share, length - positions[each]), positions[each]) for each in chosen]
            entries = [entry for entry in entries if entry[1]]
            planned = cache.plan_step(make_plan(entries))
            assert planned.errors == {}
            for seq_id, count, position in entries:
                positions[seq_id] = position + count
            num_in_flight, num_planned = num_in_flight + 1, num_planned + 1
            most = max(most, cache.pools["windows"].num_used_blocks)
            if num_in_flight == 3:
                cache.commit_step()
                num_in_flight -= 1
        cache.abort_steps()
        cache.check_integrity()
    assert cache.num_sequences == 3 * max_num_seqs
    assert most > group.num_blocks - 3 * max_num_seqs - 2 * max_num_seqs // block_size - 1, "it is no more than needed"


def test_a_sequence_whose_window_went_to_others_begins_anew() -> None:
    cache = make_cache(num_window_blocks=8, enable_prefix_cache=False)
    prefill(cache, 1, 12)
    cache.abort_steps()
    prefill(cache, 2, 24, first_token=100)
    assert open_sequence(cache, 2, list(range(100, 124)), 24).num_cached_tokens == 23, "this one has kept its own"
    result = open_sequence(cache, 1, list(range(14)), 12)
    assert (result.num_cached_tokens, result.num_freed_blocks) == (0, 3)
    run(cache, (1, 14, 0))
    assert cache.num_recovered_sequences == 1


def test_other_weights_empty_both_groups_and_find_nothing() -> None:
    cache = make_cache()
    cache.use_weights(b"one")
    prefill(cache, 1, 41)
    cache.use_weights(b"other")
    assert cache.num_used_blocks == cache.pools["windows"].num_used_blocks == cache.num_sequences == 0
    assert prefill(cache, 2, 41) == 0
