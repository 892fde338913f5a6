"""The slots of states in gated delta layers: which are kept, found again, shared, and given up."""

from __future__ import annotations

from services.attn_worker.cache.build_cache import build_cache
from services.attn_worker.cache.kv_cache import KVCache
from services.attn_worker.cache.state_group import StepStates, zero_slot
from services.common.errors import CapacityError, RequestAborted
from tests.support.attention.open_now import open_sequence
from tests.support.plans import make_plan

BLOCK_SIZE = 4
PROMPT = list(range(10, 20))  # two full blocks and two tokens


def make_cache(num_slots: int = 20, **options: bool) -> KVCache:
    return build_cache(50, BLOCK_SIZE, 64, num_state_slots=num_slots, **options)


def run(cache: KVCache, *entries: tuple[int, int, int], **parts: list[tuple[int, ...]]) -> StepStates:
    """Runs (seq_id, num_tokens, position) as one step without errors."""
    planned = cache.plan_step(make_plan(entries, **parts))
    assert not planned.errors
    cache.commit_step()
    cache.check_integrity()
    return planned.metadata.of(StepStates)


def num_used(cache: KVCache) -> int:
    return cache.pools["states"].num_used_blocks


def test_a_decoding_sequence_has_its_state_and_the_one_before() -> None:
    cache = make_cache()
    open_sequence(cache, 1, PROMPT, 10)
    run(cache, (1, 10, 0))
    for position in range(10, 17):
        states = run(cache, (1, 1, position), sampled=[(1, position)])
        assert len(states.waves) == 1 and states.waves[0].sources != states.waves[0].targets
        assert num_used(cache) == 2
    cache.close_sequences([1])
    assert num_used(cache) == 0


def test_the_state_before_the_last_committed_step_is_kept() -> None:
    """The dense worker died before its clients knew the last step's token."""
    cache = make_cache(enable_prefix_cache=False)
    open_sequence(cache, 1, PROMPT, 10)
    run(cache, (1, 10, 0))
    run(cache, (1, 1, 10), sampled=[(1, 7)])
    cache.abort_steps()
    assert open_sequence(cache, 1, [*PROMPT, 7], 10).num_cached_tokens == 10
    run(cache, (1, 1, 10))
    cache.plan_step(make_plan([(1, 1, 11)], sampled=[(1, 8)]))
    cache.abort_steps()
    assert open_sequence(cache, 1, [*PROMPT, 7, 8], 10).num_cached_tokens == 11, "the lost step's state is not the last"
    assert cache.num_recovered_tokens == 10 + 11


def test_a_sequence_without_a_state_so_far_back_is_computed_again() -> None:
    cache = make_cache(enable_prefix_cache=False)
    open_sequence(cache, 1, PROMPT, 10)
    run(cache, (1, 10, 0))
    for position in (10, 11):
        run(cache, (1, 1, position), sampled=[(1, position)])
    cache.abort_steps()
    result = open_sequence(cache, 1, [*PROMPT, 10], 10)
    assert (result.num_cached_tokens, result.num_freed_blocks, cache.num_used_blocks) == (0, 3, 0)


def test_a_prompt_leaves_a_state_at_its_last_full_block() -> None:
    cache = make_cache()
    open_sequence(cache, 1, PROMPT, 10)
    states = run(cache, (1, 10, 0))
    first, second = states.waves
    assert (first.first_rows, first.num_tokens, first.sources) == ([0], [8], [zero_slot(20)])
    assert (second.first_rows, second.num_tokens, second.sources) == ([8], [2], first.targets)
    result = open_sequence(cache, 2, [*PROMPT[:9], 99], 10)
    assert (result.num_cached_tokens, result.num_held_blocks) == (8, 2)
    assert run(cache, (2, 2, 8)).waves[0].sources == first.targets


def test_a_prompt_that_is_opened_as_not_cached_leaves_a_state_at_its_last_full_block() -> None:
    """The dense worker has not seen its beginning, and runs it with the plan that opens it."""
    cache = make_cache()
    open_sequence(cache, 1, PROMPT, 10, max_cached_tokens=0)
    run(cache, (1, 10, 0))
    for position in range(10, 18):
        run(cache, (1, 1, position), sampled=[(1, position)])
    cache.close_sequences([1])
    assert open_sequence(cache, 2, PROMPT, 10).num_cached_tokens == 8


def test_blocks_without_a_state_at_their_end_are_computed_again_and_get_one() -> None:
    """Prompts with the same beginning, as of one system prompt: the second finds where they part."""
    cache = make_cache()
    for seq_id, expected in ((1, 0), (2, 0), (3, 4)):
        prompt = [*PROMPT[:6], *[100 * seq_id] * 10]
        assert open_sequence(cache, seq_id, prompt, 16).num_cached_tokens == expected
        states = run(cache, (seq_id, 16 - expected, expected))
        assert len(states.waves) == (3 if seq_id == 2 else 2)


def test_while_a_sequence_decodes_its_last_full_block_replaces_the_one_before() -> None:
    cache = make_cache()
    open_sequence(cache, 1, PROMPT, 10)
    run(cache, (1, 10, 0))
    for position in range(10, 18):
        run(cache, (1, 1, position), sampled=[(1, position)])
    cache.close_sequences([1])
    assert cache.pools["states"].num_cached_blocks == 2
    text = [*PROMPT, *range(10, 18), 1, 2, 3]
    assert open_sequence(cache, 2, text, len(text)).num_cached_tokens == 16
    assert open_sequence(cache, 3, text[:15], 15).num_cached_tokens == 8, "that of the prompt stays"


def test_a_prompt_step_may_end_where_its_state_stays() -> None:
    cache = make_cache()
    open_sequence(cache, 1, PROMPT, 10)
    assert [len(run(cache, entry).waves) for entry in ((1, 8, 0), (1, 2, 8))] == [1, 1]
    for position in range(10, 14):
        run(cache, (1, 1, position), sampled=[(1, position)])
    cache.close_sequences([1])
    assert open_sequence(cache, 2, PROMPT, 10).num_cached_tokens == 8


def test_the_beginning_of_many_prompts_is_found_while_all_places_are_taken() -> None:
    """With the six slots for each place that the worker makes if memory allows, and the next step always planned."""
    num_places, num_tokens = 8, 30
    cache = build_cache(500, BLOCK_SIZE, 64, num_state_slots=6 * num_places)
    texts: dict[int, list[int]] = {}
    cached, num_pending, num_opened = [], 0, 0
    lengths: dict[int, int] = {}
    while num_opened < 5 * num_places:
        while len(texts) < num_places:
            num_opened += 1
            prompt = [*PROMPT[:8], *[100 * num_opened] * (2 + num_opened % 7)]
            cached.append(open_sequence(cache, num_opened, prompt, len(prompt)).num_cached_tokens)
            texts[num_opened], lengths[num_opened] = prompt, cached[-1]
        sampled = [(seq_id, lengths[seq_id]) for seq_id, text in texts.items() if lengths[seq_id] == len(text)]
        for seq_id, token_id in sampled:
            texts[seq_id].append(token_id)
        entries = [(seq_id, len(text) - lengths[seq_id], lengths[seq_id]) for seq_id, text in texts.items()]
        assert not cache.plan_step(make_plan(entries, sampled=sampled)).errors
        num_pending += 1
        lengths.update((seq_id, len(text)) for seq_id, text in texts.items())
        ended = [seq_id for seq_id, text in texts.items() if len(text) >= num_tokens + seq_id % num_places]
        while num_pending > (0 if ended else 1):
            cache.commit_step()
            num_pending -= 1
        cache.close_sequences(ended)
        for seq_id in ended:
            del texts[seq_id], lengths[seq_id]
        cache.check_integrity()
    assert cached[: num_places + 1].count(0) >= num_places, "nothing is found before it was computed"
    assert cached[num_places + 1 :] == [8] * (num_opened - num_places - 1)


def test_a_step_of_a_closed_sequence_makes_no_state_findable_for_the_next_one_in_its_row() -> None:
    cache = make_cache()
    open_sequence(cache, 1, PROMPT, 10)
    cache.plan_step(make_plan([(1, 10, 0)]))
    cache.plan_step(make_plan(close_seq_ids=[1]))
    open_sequence(cache, 2, [50] * 10, 10)
    cache.plan_step(make_plan([(2, 9, 0)]))
    for _ in range(3):
        cache.commit_step()
        cache.check_integrity()
    assert open_sequence(cache, 3, PROMPT, 10).num_cached_tokens == 0
    assert open_sequence(cache, 4, [50] * 10, 10).num_cached_tokens == 8


def test_a_sequence_whose_first_step_is_lost_stays_open() -> None:
    cache = make_cache()
    open_sequence(cache, 1, PROMPT, 10)
    cache.plan_step(make_plan([(1, 10, 0)]))
    cache.abort_steps()
    cache.check_integrity()
    assert cache.orphaned_blocks == {1: 0} and num_used(cache) == 0
    assert open_sequence(cache, 1, PROMPT, 10).num_cached_tokens == 0
    run(cache, (1, 10, 0))


def test_without_a_prefix_cache_no_step_is_cut() -> None:
    cache = make_cache(enable_prefix_cache=False)
    open_sequence(cache, 1, PROMPT, 10)
    assert len(run(cache, (1, 10, 0)).waves) == 1
    assert open_sequence(cache, 2, PROMPT, 10).num_cached_tokens == 0
    cache.close_sequences([1, 2])
    assert cache.pools["states"].num_cached_blocks == 0


def test_other_weights_find_no_states() -> None:
    cache = make_cache()
    cache.use_weights(b"one")
    open_sequence(cache, 1, PROMPT, 10)
    run(cache, (1, 10, 0))
    cache.use_weights(b"other")
    assert open_sequence(cache, 1, PROMPT, 10).num_cached_tokens == 0


def test_forks_share_a_state_and_leave_their_own() -> None:
    cache = make_cache(enable_prefix_cache=False)
    open_sequence(cache, 1, PROMPT, 10)
    before = run(cache, (1, 10, 0)).waves[0].targets
    states = run(cache, (1, 1, 10), (2, 1, 10), forks=[(1, 2, 10)], forced=[(1, 5), (2, 6)])
    assert states.waves[0].sources == before * 2
    assert len(set(states.waves[0].targets)) == 2 and num_used(cache) == 3
    cache.close_sequences([1])
    assert num_used(cache) == 2


def test_a_fork_where_there_is_no_state_is_an_error() -> None:
    cache = make_cache()
    open_sequence(cache, 1, PROMPT, 10)
    run(cache, (1, 10, 0))
    planned = cache.plan_step(make_plan(forks=[(1, 2, 9)]))
    assert isinstance(planned.errors[2], RequestAborted) and "no state there" in str(planned.errors[2])


def test_going_back_where_there_is_no_state_is_an_error_of_the_sequence() -> None:
    cache = make_cache()
    open_sequence(cache, 1, PROMPT, 10)
    run(cache, (1, 10, 0))
    planned = cache.plan_step(make_plan([(1, 1, 9)]))
    assert str(planned.errors[1]) == "sequence 1 cannot go back to token 9: it has no state there"
    cache.commit_step()
    run(cache, (1, 1, 10), sampled=[(1, 3)])
    run(cache, (1, 1, 10))  # back to the state before
    cache.check_integrity()


def test_orphans_give_up_their_states_after_checkpoints() -> None:
    cache = make_cache(num_slots=4)
    for seq_id in (1, 2):
        open_sequence(cache, seq_id, [seq_id] * 10, 10)
        run(cache, (seq_id, 10, 0))
    cache.abort_steps()
    assert open_sequence(cache, 2, [2] * 10 + [7], 10).num_cached_tokens == 10
    open_sequence(cache, 3, PROMPT, 10)
    run(cache, (2, 1, 10), (3, 10, 0))
    assert open_sequence(cache, 3, [*PROMPT, 8], 10).num_cached_tokens == 10
    run(cache, (2, 1, 11), (3, 1, 10), sampled=[(2, 7)])
    assert num_used(cache) <= 4 and open_sequence(cache, 1, [1] * 10 + [7], 10).num_cached_tokens == 0


def test_too_few_slots_for_the_sequences_of_a_plan_are_an_error_of_the_last() -> None:
    cache = make_cache(num_slots=3, enable_prefix_cache=False)
    for seq_id in (1, 2, 3):
        open_sequence(cache, seq_id, PROMPT, 10)
    run(cache, (1, 10, 0), (2, 10, 0))
    planned = cache.plan_step(make_plan([(1, 1, 10), (3, 10, 0)], sampled=[(1, 1)]))
    assert isinstance(planned.errors.pop(3), CapacityError) and not planned.errors
    cache.commit_step()
    cache.check_integrity()
    assert cache.num_free_blocks == 50 - 6, "the one that failed has no block"


def test_a_sequence_without_blocks_gives_its_slot_back() -> None:
    cache = build_cache(2, BLOCK_SIZE, 64, num_state_slots=10)
    open_sequence(cache, 1, PROMPT, 10)
    planned = cache.plan_step(make_plan([(1, 10, 0)]))
    assert isinstance(planned.errors[1], CapacityError) and num_used(cache) == 0
    cache.commit_step()
    cache.check_integrity()
