"""Examples of how opening, planning, committing and losing steps change sequences and blocks."""

from __future__ import annotations

import numpy as np
import pytest

from services.attn_worker.cache.build_cache import build_cache
from services.attn_worker.cache.cached_sequence import OpenResult
from services.attn_worker.cache.kv_cache import KVCache
from services.common.errors import CapacityError, InvalidRequest, NotFound, RequestAborted
from tests.support.attention.open_now import open_sequence
from tests.support.plans import make_plan

BLOCK_SIZE = 4


def make_cache(num_blocks: int = 16, max_model_len: int = 64, **options: object) -> KVCache:
    return build_cache(num_blocks, BLOCK_SIZE, max_model_len, **options)


def run(cache: KVCache, *entries: tuple[int, int, int], **options: object) -> int:
    """Runs one step that must succeed; returns num_freed_blocks."""
    step = cache.plan_step(make_plan(entries, **options))
    assert step.errors == {}
    cache.commit_step()
    cache.check_integrity()
    return step.num_freed_blocks


def prefill(cache: KVCache, seq_id: int, token_ids: list[int], prefix_key: bytes = b"") -> OpenResult:
    result = open_sequence(cache, seq_id, token_ids, len(token_ids), prefix_key)
    run(cache, (seq_id, len(token_ids) - result.num_cached_tokens, result.num_cached_tokens))
    return result


def test_a_shared_prefix_is_pinned_up_to_its_last_full_block() -> None:
    cache = make_cache()
    prompt = list(range(10))
    assert prefill(cache, 1, prompt) == OpenResult(1, 0, 0, 0, 0)
    result = open_sequence(cache, 2, [*prompt[:9], 99, 98], 11)
    assert result == OpenResult(2, num_cached_tokens=8, num_pinned_blocks=0, num_held_blocks=2, num_freed_blocks=0)
    assert cache.num_used_blocks == 3  # two shared blocks, and one of sequence 1


def test_nothing_of_an_earlier_generation_is_found_and_what_runs_goes_on() -> None:
    cache, prompt = make_cache(), list(range(10))
    prefill(cache, 1, prompt)
    assert open_sequence(cache, 2, prompt, 10, prefix_generation=1).num_cached_tokens == 0
    assert cache.prefix_generation == 1
    run(cache, (2, 10, 0), (1, 1, 10), sampled=[(1, 50)])
    run(cache, (1, 1, 11), sampled=[(1, 51)])  # fills a block of the earlier generation
    assert open_sequence(cache, 3, [*prompt, 50, 51, 52], 13, prefix_generation=1).num_cached_tokens == 8
    assert open_sequence(cache, 4, prompt, 10, prefix_generation=2).num_cached_tokens == 0
    cache.close_sequences([1, 2, 3, 4])
    assert cache.num_used_blocks == 0
    cache.check_integrity()


def test_a_known_sequence_keeps_its_blocks_over_a_flush() -> None:
    cache, prompt = make_cache(), list(range(10))
    prefill(cache, 1, prompt)
    assert open_sequence(cache, 1, prompt, 10, prefix_generation=1).num_cached_tokens == 9
    assert open_sequence(cache, 1, prompt, 10, prefix_generation=2).num_cached_tokens == 9
    assert open_sequence(cache, 2, prompt, 10, prefix_generation=2).num_cached_tokens == 0
    assert open_sequence(cache, 1, prompt, 10, b"other", prefix_generation=2).num_cached_tokens == 0
    cache.close_sequences([1, 2])
    assert cache.num_used_blocks == 0
    cache.check_integrity()


def test_no_more_counts_as_cached_than_another_rank_has() -> None:
    cache = make_cache()
    prompt = list(range(10))
    prefill(cache, 1, prompt)
    assert open_sequence(cache, 2, [*prompt, 99], 11, max_cached_tokens=7).num_cached_tokens == 4, "a whole block"
    assert open_sequence(cache, 3, [*prompt, 98], 11).num_cached_tokens == 8
    again = open_sequence(cache, 3, [*prompt, 98], 11, max_cached_tokens=4)
    assert (again.num_cached_tokens, again.num_held_blocks, again.num_pinned_blocks) == (4, 1, 0)
    run(cache, (3, 7, 4))


def test_a_known_sequence_goes_back_to_what_another_rank_has() -> None:
    cache = make_cache()
    prompt = list(range(10))
    prefill(cache, 1, prompt)
    run(cache, (1, 1, 10), sampled=[(1, 50)])
    cache.abort_steps()  # its dense worker dies
    kept = open_sequence(cache, 1, [*prompt, 50, 51], 10, max_cached_tokens=10)
    assert kept.num_cached_tokens == 10
    gone = open_sequence(cache, 1, [*prompt, 50, 51], 10, max_cached_tokens=0)
    assert gone.num_cached_tokens == 0
    run(cache, (1, 12, 0))


def test_at_least_the_last_token_is_left_to_compute() -> None:
    cache = make_cache()
    prefill(cache, 1, list(range(8)))
    assert open_sequence(cache, 2, list(range(8)), 8).num_cached_tokens == 4


def test_a_pinned_cached_block_is_no_longer_free() -> None:
    cache = make_cache(num_blocks=8)
    prefill(cache, 1, list(range(9)))
    assert run(cache, close_seq_ids=[1]) == 3
    assert (cache.num_free_blocks, cache.num_cached_blocks) == (8, 2)
    assert open_sequence(cache, 2, list(range(9)), 9) == OpenResult(2, 8, 2, 2, 0)
    assert (cache.num_free_blocks, cache.num_cached_blocks) == (6, 0)


@pytest.mark.parametrize("changed", [0, 3, 5])
def test_a_different_token_ends_the_shared_prefix(changed: int) -> None:
    cache = make_cache()
    prompt = list(range(9))
    prefill(cache, 1, prompt)
    prompt[changed] = 77
    assert open_sequence(cache, 2, prompt, 9).num_cached_tokens == changed // BLOCK_SIZE * BLOCK_SIZE


def test_equal_blocks_after_different_prefixes_are_not_shared() -> None:
    cache = make_cache()
    prefill(cache, 1, [1, 1, 1, 1, 5, 5, 5, 5, 0])
    assert open_sequence(cache, 2, [5, 5, 5, 5, 0], 5).num_cached_tokens == 0


def test_other_salts_and_other_weights_never_hit() -> None:
    cache = make_cache()
    prompt = list(range(9))
    cache.use_weights(b"one")
    prefill(cache, 1, prompt, b"tenant")
    assert open_sequence(cache, 2, prompt, 9, b"other").num_cached_tokens == 0
    assert open_sequence(cache, 3, prompt, 9, b"tenant").num_cached_tokens == 8
    cache.use_weights(b"one")
    assert cache.num_sequences == 3
    cache.use_weights(b"two")
    assert cache.num_sequences == 0 and cache.num_used_blocks == 0
    assert open_sequence(cache, 4, prompt, 9, b"tenant").num_cached_tokens == 0


def test_without_prefix_cache_no_block_is_found_or_cached() -> None:
    cache = make_cache(enable_prefix_cache=False)
    prefill(cache, 1, list(range(9)))
    assert open_sequence(cache, 2, list(range(9)), 9).num_cached_tokens == 0
    run(cache, close_seq_ids=[1, 2])
    assert cache.num_cached_blocks == 0 and cache.num_free_blocks == 16


def test_length_dependent_keys_are_shared_only_between_prompts_of_equal_length() -> None:
    cache = make_cache(length_dependent_beyond=10)
    prefill(cache, 1, list(range(12)))
    assert open_sequence(cache, 2, list(range(13)), 13).num_cached_tokens == 0
    assert open_sequence(cache, 3, list(range(12)), 12).num_cached_tokens == 8
    prefill(cache, 4, list(range(9)))
    assert open_sequence(cache, 5, list(range(10)), 10).num_cached_tokens == 8


def test_generated_tokens_can_be_found_once_known() -> None:
    cache = make_cache()
    prefill(cache, 1, [0, 1, 2])
    run(cache, (1, 1, 3))  # token 3 was sampled on the device, its id is not known here
    run(cache, (1, 1, 4))
    assert open_sequence(cache, 2, [0, 1, 2, 3, 4], 5).num_cached_tokens == 0
    run(cache, (1, 1, 5), sampled=[(1, 3), (1, 4)])
    assert open_sequence(cache, 3, [0, 1, 2, 3, 4], 5).num_cached_tokens == 4


def test_the_last_sampled_tokens_of_a_closing_sequence_are_cached_too() -> None:
    cache = make_cache()
    prefill(cache, 1, [0, 1, 2])
    run(cache, (1, 1, 3))
    run(cache, close_seq_ids=[1], sampled=[(1, 3)])
    assert open_sequence(cache, 2, [0, 1, 2, 3, 4], 5).num_cached_tokens == 4


def test_uncommitted_blocks_are_never_found() -> None:
    cache = make_cache()
    open_sequence(cache, 1, list(range(9)), 9)
    cache.plan_step(make_plan([(1, 9, 0)]))
    cache.abort_steps()
    assert open_sequence(cache, 2, list(range(9)), 9).num_cached_tokens == 0


def test_metadata_of_a_mixed_step() -> None:
    cache = make_cache()
    prefill(cache, 1, [1, 2, 3, 4, 5])  # blocks 0, 1
    open_sequence(cache, 2, list(range(7)), 7)
    step = cache.plan_step(make_plan([(1, 1, 5), (2, 6, 0)])).metadata  # the second takes blocks 2, 3
    assert step.num_tokens.tolist() == [1, 6] and step.context_lens.tolist() == [6, 6]
    assert step.block_tables.tolist() == [[0, 1], [2, 3]]
    assert step.positions.tolist() == [5, 0, 1, 2, 3, 4, 5]
    assert step.slot_mapping.tolist() == [5, 8, 9, 10, 11, 12, 13]
    assert step.rope_lens.tolist() == [6, 7, 7, 7, 7, 7, 7]
    others = ("windows", "others", "rope_positions", "num_later", "num_other_rows")
    dtypes = {name: getattr(step, name).dtype for name in step.__slots__ if name not in others}
    assert dtypes.pop("slot_mapping") == np.int64 and set(dtypes.values()) == {np.dtype(np.int32)}


def test_a_step_may_only_close_sequences() -> None:
    cache = make_cache()
    prefill(cache, 1, [1, 2, 3])
    step = cache.plan_step(make_plan([], close_seq_ids=[1, 5]))
    assert step.num_freed_blocks == 1 and len(step.metadata.positions) == 0
    cache.commit_step()


def test_a_sequence_that_does_not_fit_keeps_its_rows_in_the_null_block() -> None:
    cache = make_cache(num_blocks=3)
    open_sequence(cache, 1, [1] * 5, 5)
    open_sequence(cache, 2, [2] * 7, 7)
    step = cache.plan_step(make_plan([(1, 5, 0), (2, 7, 0)]))
    assert isinstance(step.errors.pop(2), CapacityError) and not step.errors
    assert step.metadata.block_tables.tolist() == [[0, 1], [3, 3]]
    assert step.metadata.slot_mapping.tolist() == [0, 1, 2, 3, 4, 12, 13, 14, 15, 12, 13, 14]
    cache.commit_step()
    cache.check_integrity()
    run(cache, (2, 4, 0))  # the failed entry counted nothing, so fewer tokens fit


def test_entries_that_contradict_the_cache_fail_alone() -> None:
    cache = make_cache(max_model_len=12)
    for seq_id in (1, 2, 3, 4):
        prefill(cache, seq_id, [seq_id] * 10)
    step = cache.plan_step(make_plan([(1, 1, 10), (2, 1, 11), (3, 3, 10), (4, 1, 10), (4, 1, 10), (5, 2, 0)]))
    assert {seq_id: type(error) for seq_id, error in step.errors.items()} == {
        2: RequestAborted,
        3: RequestAborted,
        4: RequestAborted,
        5: NotFound,
    }
    assert len(step.metadata.positions) == 9
    assert (step.metadata.block_tables[1:] == cache.num_blocks).all()
    cache.commit_step()
    run(cache, (1, 1, 11), (2, 1, 10), (3, 2, 10), (4, 1, 10))


@pytest.mark.parametrize("num_tokens", [0, -1, 65])
def test_an_impossible_number_of_tokens_refuses_the_whole_step(num_tokens: int) -> None:
    cache = make_cache()
    prefill(cache, 1, [1, 2, 3])
    with pytest.raises(InvalidRequest, match=f"{num_tokens} tokens"):
        cache.plan_step(make_plan([(1, num_tokens, 3)], close_seq_ids=[1]))
    assert cache.num_sequences == 1


@pytest.mark.parametrize(("num_tokens", "num_prompt_tokens"), [(0, 0), (65, 65), (3, 4), (3, 0)])
def test_impossible_lengths_are_refused(num_tokens: int, num_prompt_tokens: int) -> None:
    with pytest.raises(InvalidRequest, match="max_model_len 64"):
        open_sequence(make_cache(), 1, [1] * num_tokens, num_prompt_tokens)


def test_an_aborted_step_frees_its_blocks_and_can_be_planned_again() -> None:
    cache = make_cache()
    prefill(cache, 1, [1, 2, 3])
    first = cache.plan_step(make_plan([(1, 6, 3)]))
    assert cache.num_used_blocks == 3
    assert cache.abort_steps() == 2
    cache.check_integrity()
    again = cache.plan_step(make_plan([(1, 6, 3)]))
    assert again.errors == {} and first.metadata.positions.tolist() == again.metadata.positions.tolist()


def test_a_resubmitted_sequence_continues_at_its_committed_length() -> None:
    cache = make_cache()
    prefill(cache, 1, list(range(6)))
    run(cache, (1, 1, 6))  # the token 50 at position 6
    cache.plan_step(make_plan([(1, 1, 7)]))  # token 51; the dense worker dies here
    cache.abort_steps()
    assert open_sequence(cache, 1, [*range(6), 50, 51], 6) == OpenResult(1, 7, 0, 2, 0, num_recovered_tokens=7)
    run(cache, (1, 1, 7))


def test_a_journal_shorter_than_the_committed_length_rolls_the_sequence_back() -> None:
    cache = make_cache()
    prefill(cache, 1, list(range(6)))
    for length in (6, 7, 8):
        run(cache, (1, 1, length))
    assert open_sequence(cache, 1, [*range(6), 50], 6) == OpenResult(1, 6, 0, 2, 1, num_recovered_tokens=6)
    run(cache, (1, 1, 6))


def test_what_a_resubmitted_sequence_has_computed_itself_is_told_apart_from_what_it_had_found() -> None:
    cache, prompt = make_cache(), list(range(10))
    prefill(cache, 1, prompt)
    longer = [*prompt, 99, 98, 97]
    assert open_sequence(cache, 2, longer, 13) == OpenResult(2, num_cached_tokens=8, num_held_blocks=2)
    run(cache, (2, 4, 8))
    for _ in range(2):  # dense workers that die
        cache.abort_steps()
        again = open_sequence(cache, 2, longer, 13)
        assert (again.num_cached_tokens, again.num_recovered_tokens) == (12, 4)
    fewer = open_sequence(cache, 2, longer, 13, max_cached_tokens=4)
    assert (fewer.num_cached_tokens, fewer.num_recovered_tokens) == (4, 0)


def test_a_resubmission_with_other_tokens_starts_like_a_new_sequence() -> None:
    cache = make_cache()
    prefill(cache, 1, list(range(10)))
    result = open_sequence(cache, 1, [0, 1, 2, 3, 4, 99, 6, 7, 8, 9], 10)
    assert result == OpenResult(1, num_cached_tokens=4, num_pinned_blocks=1, num_held_blocks=1, num_freed_blocks=3)
    cache.check_integrity()
    salted = open_sequence(cache, 1, [0, 1, 2, 3, 4], 5, b"salt")
    assert salted == OpenResult(1, 0, 0, 0, num_freed_blocks=1)


def test_blocks_with_unknown_tokens_are_never_found() -> None:
    cache = make_cache()
    prefill(cache, 1, [0, 1, 2])
    run(cache, (1, 1, 3))
    with_confirmation = cache.plan_step(make_plan([(1, 1, 4)], sampled=[(1, 3)]))
    assert with_confirmation.errors == {}
    cache.abort_steps()
    open_sequence(cache, 1, [0, 1, 2, 99, 4], 3)
    assert open_sequence(cache, 2, [0, 1, 2, 3, 4], 5).num_cached_tokens == 0


def test_a_cached_block_is_no_longer_found_before_it_is_overwritten() -> None:
    cache = make_cache()
    prefill(cache, 1, [0, 1, 2])
    run(cache, (1, 1, 3))
    run(cache, (1, 1, 4), sampled=[(1, 3)])  # block 0 can be found as 0 1 2 3
    assert open_sequence(cache, 1, [0, 1, 2], 3).num_cached_tokens == 2
    assert open_sequence(cache, 2, [0, 1, 2, 3, 4], 5).num_cached_tokens == 0
    cache.close_sequences([2])
    run(cache, (1, 1, 2))
    run(cache, (1, 1, 3))  # this time token 7 is sampled
    run(cache, (1, 1, 4), sampled=[(1, 7)])
    assert open_sequence(cache, 2, [0, 1, 2, 3, 4], 5).num_cached_tokens == 0
    assert open_sequence(cache, 3, [0, 1, 2, 7, 4], 5).num_cached_tokens == 4


def test_a_shared_block_is_released_and_not_overwritten() -> None:
    cache = make_cache()
    prefill(cache, 1, list(range(9)))
    prefill(cache, 2, list(range(9)))
    result = open_sequence(cache, 1, list(range(7)), 7)
    assert result == OpenResult(1, 4, 0, num_held_blocks=1, num_freed_blocks=1, num_recovered_tokens=4)
    cache.check_integrity()


def test_tables_grow_with_the_number_of_sequences() -> None:
    cache = make_cache(num_blocks=500)
    for seq_id in range(300):
        open_sequence(cache, seq_id, [seq_id, 1, 2, 3, 4], 5)
    run(cache, *[(seq_id, 5, 0) for seq_id in range(200)])
    assert cache.num_used_blocks == 400 and cache.orphaned_blocks[199] == 2 and cache.orphaned_blocks[200] == 0
    run(cache, close_seq_ids=range(300))
    assert cache.num_free_blocks == 500 and cache.num_sequences == 0


def test_sequence_that_ignores_the_prefix_cache_computes_every_token() -> None:
    cache = make_cache()
    prompt = list(range(10))
    prefill(cache, 1, prompt)
    assert open_sequence(cache, 2, prompt, 10, ignores_prefix_cache=True) == OpenResult(2, 0, 0, 0, 0)
    run(cache, (2, 10, 0))
    assert cache.num_used_blocks == 6  # nothing is shared
    assert open_sequence(cache, 3, prompt, 10).num_cached_tokens == 8  # others still find the prefix


def test_known_sequence_that_ignores_the_prefix_cache_starts_again() -> None:
    cache = make_cache()
    prompt = list(range(10))
    prefill(cache, 1, prompt)
    assert open_sequence(cache, 1, [*prompt, 77], 10, ignores_prefix_cache=True) == OpenResult(1, 0, 0, 0, 3)
    run(cache, (1, 11, 0))
    assert cache.num_used_blocks == 3
