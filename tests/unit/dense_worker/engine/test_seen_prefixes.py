"""Sequences of which nothing is cached run in the plan that opens them; all others wait for the answer."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from services.attn_worker.cache.build_cache import build_cache
from services.attn_worker.cache.kv_cache import KVCache
from services.common.sampling_params import SamplingParams
from services.dense_worker.engine.limits import SchedulerLimits
from services.dense_worker.engine.scheduler import Scheduler
from services.dense_worker.engine.sequence import SUSPECT_CRASHES, FinishReason, Sequence, SequenceStatus
from services.dense_worker.engine.session import ScheduledStep, SeenPrefixes
from services.step import PlanAccepted, SequenceOpened
from tests.support.dense.scheduler_cluster import BLOCK_SIZE, MAX_MODEL_LEN, new_attachment, sample
from tests.support.dense.sequences import new_sequence

NUM_BLOCKS = 32


def make(seq_id: int, token_ids: list[int], max_tokens: int = 2, **spec: object) -> Sequence:
    return new_sequence(seq_id, f"r{seq_id}", token_ids, SamplingParams(), max_tokens, **spec)


def started(cache: KVCache, *, is_empty: bool = True) -> Scheduler:
    scheduler = Scheduler(SchedulerLimits(4, 16, MAX_MODEL_LEN, 100, "guaranteed_no_evict"))
    scheduler.begin(new_attachment(cache, is_empty=is_empty))
    scheduler.session.num_completed = 1
    return scheduler


def open_at_cache(cache: KVCache, published: ScheduledStep) -> list[int]:
    """Opens what a plan opens; returns how many tokens of each would be found, which the scheduler says are none."""
    found = []
    for new in published.plan.new_sequences:
        assert new.starts_empty
        found.append(cache.open_sequence(replace(new, starts_empty=False)).num_cached_tokens)
        cache.close_sequences([new.seq_id])
        assert not cache.open_sequence(new).num_cached_tokens
    return found


def run_to_end(scheduler: Scheduler, cache: KVCache) -> list[int]:
    """Runs all steps; returns what `open_at_cache` found in them, after answers to all other openings."""
    found, is_over = [], False
    while not is_over:
        scheduler.next_to_open()
        openings = scheduler.plan_openings()
        for new in () if openings is None else openings.new_sequences:
            result = cache.open_sequence(new)
            held = result.num_held_blocks
            scheduler.opened(SequenceOpened(new.seq_id, result.num_cached_tokens, result.num_pinned_blocks, held))
        is_over = (published := scheduler.schedule()) is None
        if published is not None:
            found += open_at_cache(cache, published)
            step = cache.plan_step(published.plan)
            assert not step.errors
            cache.commit_step()
            if published.plan.frees_blocks:
                scheduler.accepted(PlanAccepted(published.plan.step_id, step.num_freed_blocks))
            scheduler.update(published, sample(published.plan))
    return found


def test_a_first_sequence_runs_in_the_plan_that_opens_it() -> None:
    cache = build_cache(NUM_BLOCKS, BLOCK_SIZE, MAX_MODEL_LEN)
    scheduler, sequence = started(cache), make(1, [5] * 9)
    scheduler.add(sequence)
    assert scheduler.next_to_open() == [sequence] and sequence.status is SequenceStatus.RUNNING
    assert scheduler.plan_openings() is None, "no answer is needed, so none is asked for ahead of the plan"
    published = scheduler.schedule()
    assert published is not None and [each.seq_id for each in published.plan.new_sequences] == [1]
    assert [(entry.seq_id, entry.position, entry.num_tokens) for entry in published.plan.entries] == [(1, 0, 9)]
    assert open_at_cache(cache, published) == [0] and not cache.plan_step(published.plan).errors


def test_each_plan_opens_only_those_that_it_runs() -> None:
    cache = build_cache(NUM_BLOCKS, BLOCK_SIZE, MAX_MODEL_LEN)
    scheduler = started(cache)
    for seq_id in (1, 2, 3):
        scheduler.add(make(seq_id, [seq_id] * 9))
    assert len(scheduler.next_to_open()) == 3
    opened = []
    for _ in range(2):  # steps of 16 tokens: 9 and 7, then a token, 2 and 9
        published = scheduler.schedule()
        assert published is not None
        opened.append([each.seq_id for each in published.plan.new_sequences])
        open_at_cache(cache, published)
        assert not cache.plan_step(published.plan).errors
        cache.commit_step()
        scheduler.update(published, sample(published.plan))
    assert opened == [[1, 2], [3]]


def test_a_sequence_that_is_cancelled_before_its_first_plan_is_opened_by_none() -> None:
    cache = build_cache(NUM_BLOCKS, BLOCK_SIZE, MAX_MODEL_LEN)
    scheduler = started(cache)
    for seq_id in (1, 2, 3):
        scheduler.add(make(seq_id, [seq_id] * 9))
    scheduler.next_to_open()
    scheduler.cancel(3)
    found = run_to_end(scheduler, cache)
    scheduler.add(make(3, [1] * 9))  # its gateway has come back: by now a block of its prompt is known
    assert found == [0, 0] and run_to_end(scheduler, cache) == [], "it has waited for its answer"
    assert cache.num_sequences == 0


def test_nothing_is_known_of_a_cache_that_was_not_empty() -> None:
    cache = build_cache(NUM_BLOCKS, BLOCK_SIZE, MAX_MODEL_LEN)
    scheduler, sequence = started(cache, is_empty=False), make(1, [5] * 9)
    scheduler.add(sequence)
    scheduler.next_to_open()
    assert sequence.status is SequenceStatus.OPENING


def test_a_cache_is_empty_until_it_has_had_a_full_block() -> None:
    cache = build_cache(NUM_BLOCKS, BLOCK_SIZE, MAX_MODEL_LEN)
    assert cache.is_empty
    scheduler = started(cache)
    scheduler.add(make(1, [5] * 9))
    run_to_end(scheduler, cache)
    assert cache.num_sequences == 0 and not cache.is_empty


def test_the_next_turn_of_a_short_prompt_is_looked_for() -> None:
    cache = build_cache(NUM_BLOCKS, BLOCK_SIZE, MAX_MODEL_LEN)
    scheduler, first = started(cache), make(1, [5, 6], max_tokens=6)
    scheduler.add(first)
    run_to_end(scheduler, cache)
    turn = make(2, [5, 6, *first.output_token_ids, 3])
    scheduler.add(turn)
    run_to_end(scheduler, cache)
    assert first.num_cached_tokens == 0 and turn.num_cached_tokens == BLOCK_SIZE


def test_what_may_be_found_depends_on_the_salt_and_the_first_block() -> None:
    cache = build_cache(NUM_BLOCKS, BLOCK_SIZE, MAX_MODEL_LEN)
    scheduler = started(cache)
    scheduler.add(make(1, [5] * 9))
    run_to_end(scheduler, cache)
    others = [make(2, [5] * 9, cache_salt="salt"), make(3, [5] * 3), make(4, [6, 5, 5, 5, 5]), make(5, [5] * 5)]
    for each in others:
        scheduler.add(each)
    scheduler.next_to_open()
    assert [each.status.name for each in others] == ["RUNNING", "RUNNING", "RUNNING", "OPENING"]


def test_no_cached_block_is_missed_and_few_first_blocks_are_remembered() -> None:
    """Prompts of few tokens, so that many begin alike; 12 blocks, so that blocks are evicted."""
    random, cache = Random(1), build_cache(12, BLOCK_SIZE, MAX_MODEL_LEN)
    scheduler, num_at_once = started(cache), 0
    for seq_id in range(1, 400):
        sequence = make(seq_id, [random.randrange(3) for _ in range(random.randrange(1, 14))], random.randrange(1, 8))
        scheduler.add(sequence)
        found = run_to_end(scheduler, cache)
        num_at_once += len(found)
        assert not any(found), "the scheduler has missed cached blocks"
        assert len(scheduler.session.prefixes._seen) <= 12
    assert 100 < num_at_once < 399


def test_later_ones_find_nothing_of_one_that_was_to_start_when_prefixes_were_forgotten() -> None:
    cache = build_cache(NUM_BLOCKS, BLOCK_SIZE, MAX_MODEL_LEN)
    scheduler = started(cache)
    first, second, third = [make(seq_id, [5] * 9) for seq_id in (1, 2, 3)]
    scheduler.add(first)
    assert scheduler.next_to_open() == [first]
    scheduler.forget_prefixes()
    for each in (first, second, third):
        if each is not first:
            scheduler.add(each)
        run_to_end(scheduler, cache)
    assert [each.num_cached_tokens for each in (first, second, third)] == [0, 0, 2 * BLOCK_SIZE]


def test_one_that_is_cancelled_before_its_plan_is_never_opened() -> None:
    cache = build_cache(NUM_BLOCKS, BLOCK_SIZE, MAX_MODEL_LEN)
    scheduler = started(cache)
    scheduler.add(make(1, [5] * 9))
    scheduler.next_to_open()
    scheduler.cancel(1)
    published = scheduler.schedule()
    assert published is not None and not published.plan.new_sequences
    assert published.plan.close_seq_ids == (1,), "the runner knows it, and forgets it by this"
    step = cache.plan_step(published.plan)
    assert not step.errors and not step.num_freed_blocks
    cache.commit_step()
    scheduler.accepted(PlanAccepted(published.plan.step_id))
    scheduler.update(published, sample(published.plan))
    ledger = scheduler.session.ledger
    assert (ledger.num_free_blocks, ledger.num_reserved_blocks) == (NUM_BLOCKS, 0)
    scheduler.add(make(1, [5] * 9))  # the same id again
    run_to_end(scheduler, cache)
    assert cache.num_sequences == 0 and ledger.num_free_blocks == NUM_BLOCKS


def test_one_that_is_cancelled_after_its_plan_is_closed_by_the_next() -> None:
    cache = build_cache(NUM_BLOCKS, BLOCK_SIZE, MAX_MODEL_LEN)
    scheduler = started(cache)
    scheduler.add(make(1, [5] * 9))
    scheduler.next_to_open()
    published = scheduler.schedule()
    assert published is not None
    scheduler.cancel(1)
    open_at_cache(cache, published)
    cache.plan_step(published.plan)
    cache.commit_step()
    assert not scheduler.update(published, sample(published.plan)).others
    run_to_end(scheduler, cache)
    assert cache.num_sequences == 0 and scheduler.session.ledger.num_free_blocks == NUM_BLOCKS


def test_one_that_is_refused_ends_and_gives_back_the_blocks_of_its_step() -> None:
    cache = build_cache(NUM_BLOCKS, BLOCK_SIZE, MAX_MODEL_LEN)
    scheduler = started(cache)
    scheduler.add(make(1, [5] * 9))
    scheduler.next_to_open()
    published = scheduler.schedule()
    assert published is not None
    output = scheduler.opened(SequenceOpened(1, error="no room"))
    assert output is not None and output.finish_reason is FinishReason.ERROR and str(output.error) == "no room"
    step = cache.plan_step(published.plan)  # it was not opened, so that its entry fails
    cache.commit_step()
    errors = {seq_id: str(error) for seq_id, error in step.errors.items()}
    assert scheduler.accepted(PlanAccepted(published.plan.step_id, errors=errors)) == []
    assert not scheduler.update(published, sample(published.plan)).others
    run_to_end(scheduler, cache)
    ledger = scheduler.session.ledger
    assert (ledger.num_free_blocks, ledger.num_reserved_blocks) == (NUM_BLOCKS, 0)


def test_suspects_wait_for_the_answer_one_at_a_time() -> None:
    cache = build_cache(NUM_BLOCKS, BLOCK_SIZE, MAX_MODEL_LEN)
    scheduler = started(cache)
    suspects, other = [make(seq_id, [seq_id] * 9) for seq_id in (1, 2)], make(3, [7] * 9)
    for each in suspects:
        each.num_crashes = SUSPECT_CRASHES
    for each in (*suspects, other):
        scheduler.add(each)
    assert scheduler.next_to_open() == [suspects[0]] and suspects[0].status is SequenceStatus.OPENING


def test_the_first_sequence_of_an_attachment_waits_for_the_answer() -> None:
    """Its gateway must know that it runs, in case that it ends the process each time."""
    cache = build_cache(NUM_BLOCKS, BLOCK_SIZE, MAX_MODEL_LEN)
    scheduler, sequence = started(cache), make(1, [5] * 9)
    scheduler.session.num_completed = 0
    scheduler.add(sequence)
    assert scheduler.next_to_open() == [sequence] and sequence.status is SequenceStatus.OPENING


def test_what_is_remembered_follows_the_caches() -> None:
    prefixes = SeenPrefixes(BLOCK_SIZE)
    prefixes.set_cache(0, 3, is_empty=True)
    prefixes.set_cache(1, 4, is_empty=False)
    sequences = [make(seq_id, [seq_id] * 9) for seq_id in range(1, 9)]
    for each in sequences:
        prefixes.note(each)
    assert all(prefixes.may_have(each) for each in sequences), "anything may be in the second cache"
    prefixes.remove_cache(1)
    assert [prefixes.may_have(each) for each in sequences] == [False] * 5 + [True] * 3
