"""The scheduler with sequences that are larger than each KV cache: parts of them are in several, which come and go."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.attn_worker.cache.build_cache import build_cache
from services.attn_worker.split_context.parted_cache import PartedKVCache
from services.common.errors import CapacityError, PeerError
from services.dense_worker.attention_workers.split_context.dividing_placement import DividingPlacement
from services.dense_worker.attention_workers.split_context.part_openings import PartOpenings
from services.dense_worker.engine.engine import progress_of
from services.dense_worker.engine.limits import Policy
from services.dense_worker.engine.observer import EngineCounts
from services.dense_worker.engine.sequence import Sequence, SequenceStatus
from services.step import NewSequence, SequenceOpened
from tests.support.dense.scheduler_cluster import BLOCK_SIZE, MAX_MODEL_LEN, expected_output, make_sequence
from tests.support.dense.sequences import ask
from tests.support.examples import examples
from tests.unit.dense_worker.attention_workers.test_several_caches import Workers

NUM_BLOCKS = 6  # of a cache


class PartedWorkers(Workers):
    """Workers that also have parts of sequences."""

    def __init__(self, num_workers: int, policy: Policy = "guaranteed_no_evict", num_blocks: int = NUM_BLOCKS) -> None:
        super().__init__(num_workers, policy, num_blocks, DividingPlacement())
        self.scheduler._await_caches(num_workers * num_blocks)
        self.caches = {each: self.new_cache() for each in self.caches}
        self.openings = PartOpenings()

    def new_cache(self) -> PartedKVCache:
        cache = build_cache(self.num_blocks, BLOCK_SIZE, MAX_MODEL_LEN, make_cache=PartedKVCache)
        assert isinstance(cache, PartedKVCache)
        return cache

    def add(self) -> int:
        cache_id = super().add()
        self.caches[cache_id] = self.new_cache()
        return cache_id

    def open(self, sequence: Sequence) -> None:
        if sequence.divided is None:
            super().open(sequence)
            return
        news = sequence.describe_to_caches()
        self.openings.expect(news)
        for new in news:
            assert new.part is not None
            answer = self.caches[new.cache_id].open_part(new.seq_id, new.part)
            if (whole := self.openings.note(answer_of(answer, new.cache_id))) is not None:
                self.scheduler.opened(whole)


def answer_of(answer: SequenceOpened, cache_id: int) -> SequenceOpened:
    """The answer as the client passes it on."""
    held = {"num_pinned_blocks": answer.num_pinned_blocks, "num_held_blocks": answer.num_held_blocks}
    return SequenceOpened(answer.seq_id, cache_id=cache_id, **held)


EVENTS = st.lists(
    st.tuples(st.integers(0, 60), st.sampled_from(["lose", "add", "cancel"]), st.integers(0, 5)), max_size=5
)
REQUESTS = st.lists(st.tuples(st.integers(1, 50), st.integers(1, 20), st.integers(0, 3)), min_size=1, max_size=8)


@settings(max_examples=examples(150), deadline=None)
@given(REQUESTS, EVENTS, st.sampled_from(["guaranteed_no_evict", "max_utilization"]), st.integers(2, 3))
def test_every_sequence_gets_its_tokens_whatever_its_size(
    arrivals: list[tuple[int, int, int]], events: list[tuple[int, str, int]], policy: Policy, num_workers: int
) -> None:
    workers, sequences, number, cancelled = PartedWorkers(num_workers, policy), list[Sequence](), 0, set[int]()
    most = min(num_workers * NUM_BLOCKS * BLOCK_SIZE, MAX_MODEL_LEN)

    def step() -> None:
        nonlocal number
        number += 1
        for _, event, choice in (each for each in events if each[0] == number):
            if event == "add":
                workers.add()
            elif event == "lose":  # its successor comes two steps later
                workers.lose(sorted(workers.caches)[choice % len(workers.caches)], is_crash=choice % 2 == 0)
                if len(workers.caches) > 1:
                    workers.step()
                workers.add()
            elif choice in range(1, len(sequences) + 1):
                cancelled.add(choice)
                workers.scheduler.cancel(choice)
        workers.step()

    for seq_id, (prompt_len, max_tokens, gap) in enumerate(arrivals, start=1):
        sequences.append(make_sequence(seq_id, min(prompt_len, most - max_tokens), max_tokens))
        workers.scheduler.add(sequences[-1])
        for _ in range(gap):
            step()
    while number < 61:
        step()
    workers.run_until_idle()
    errors = {each.sequence.seq_id: each.error for each in workers.outputs if each.error is not None}
    for sequence in sequences:
        if sequence.seq_id not in cancelled | errors.keys():
            assert sequence.output_token_ids == expected_output(sequence)
    assert not any(workers.splitter._parts.values()) and not workers.openings._missing


def run(workers: PartedWorkers, num_steps: int) -> None:
    for _ in range(num_steps):
        workers.step()


def test_a_large_sequence_has_parts_in_several_caches_beside_small_ones() -> None:
    workers = PartedWorkers(3)
    small, large = make_sequence(1, 6, 10), make_sequence(2, 40, 8)  # 4 and 12 blocks
    for sequence in (small, large):
        workers.scheduler.add(sequence)
    run(workers, 4)
    assert small.cache_ids == (0,) and large.divided is not None and len(large.divided.cache_ids) == 2
    news = large.describe_to_caches()
    assert [each.part for each in news] == [range(0, 24), range(24, 48)], "as few parts as there can be"
    assert not any(each.token_ids for each in news)
    workers.run_until_idle()
    assert [each.output_token_ids for each in (small, large)] == [expected_output(each) for each in (small, large)]


@pytest.mark.parametrize("lost", [0, 1])
def test_a_sequence_that_loses_a_part_waits_for_another_worker(lost: int) -> None:
    workers = PartedWorkers(2)
    large = make_sequence(1, 30, 10)
    workers.scheduler.add(large)
    run(workers, 5)
    assert large.status is SequenceStatus.RUNNING
    workers.lose(lost)
    run(workers, 5)
    assert large.status is SequenceStatus.WAITING
    [left] = workers.caches.values()
    assert left.num_free_blocks == NUM_BLOCKS, "the other part is closed"
    workers.add()
    workers.run_until_idle()
    assert large.output_token_ids == expected_output(large)


@pytest.mark.parametrize("is_sent", [False, True])
@pytest.mark.parametrize("lost", [0, 1])
def test_a_part_that_is_opened_while_another_one_is_lost_is_closed(lost: int, is_sent: bool) -> None:
    workers = PartedWorkers(2)
    large = make_sequence(1, 30, 10)
    workers.scheduler.add(large)
    assert workers.scheduler.next_to_open() == [large]
    if is_sent:
        opening = workers.scheduler.plan_openings()
        assert opening is not None
        for new in (new for part in workers.splitter.split(opening).parts.values() for new in part.new_sequences):
            assert new.part is not None
            workers.caches[new.cache_id].open_part(1, new.part)
    workers.lose(lost)
    if is_sent:  # the answers come too late
        assert workers.scheduler.opened(SequenceOpened(1, num_held_blocks=10, cache_id=1 - lost)) is None
    assert workers.scheduler.plan_openings() is None
    run(workers, 3)
    [left], [ledger] = workers.caches.values(), workers.scheduler.session.ledgers.values()
    assert (left.num_free_blocks, ledger.num_free_blocks, ledger.num_reserved_blocks) == (NUM_BLOCKS, NUM_BLOCKS, 0)
    workers.add()
    workers.run_until_idle()
    assert large.output_token_ids == expected_output(large)


@pytest.mark.parametrize("client", [0, 1])
def test_others_do_not_wait_behind_a_sequence_that_waits_for_a_worker(client: int) -> None:
    workers = PartedWorkers(2)
    large, small = make_sequence(1, 30, 10), make_sequence(2, 6, 10)
    workers.scheduler.add(large)
    workers.lose(1)
    ask(small, client=client)  # 0: the same one
    workers.scheduler.add(small)
    run(workers, 20)
    assert small.output_token_ids == expected_output(small)
    workers.add()
    workers.run_until_idle()
    assert large.output_token_ids == expected_output(large)


def test_others_do_not_wait_behind_a_suspect_that_waits_for_a_worker() -> None:
    """A smaller suspect goes before all, alone. So does the large one when its worker is back."""
    workers = PartedWorkers(2)
    large, small, suspect, long = [make_sequence(seq_id + 1, each, 10) for seq_id, each in enumerate((30, 6, 6, 6))]
    large.num_crashes = suspect.num_crashes = 2
    for sequence in (large, small, suspect):
        workers.scheduler.add(sequence)
    workers.lose(1)

    def step() -> None:
        workers.step()
        if workers.in_flight is not None:
            running = set(workers.in_flight[0].plan.entries.seq_ids.tolist())
            for each in (large, suspect):
                assert each.seq_id not in running or not each.is_suspect or running == {each.seq_id}

    for _ in range(50):
        step()
        assert suspect.output_token_ids or not small.output_token_ids, "a suspect goes before others"
    assert [each.output_token_ids for each in (small, suspect)] == [expected_output(each) for each in (small, suspect)]
    workers.scheduler.add(long)
    for _ in range(3):
        step()
    assert long.status is SequenceStatus.RUNNING and large.is_suspect
    workers.add()
    for _ in range(40):
        step()
    assert [each.output_token_ids for each in (large, long)] == [expected_output(each) for each in (large, long)]


def test_others_do_not_wait_behind_one_that_gets_room_when_a_worker_dies() -> None:
    workers = PartedWorkers(3, num_blocks=12)
    rich = crowd(workers, 6, 20)  # 6 blocks each
    large = arrive(workers, 10, 30, 20)  # 13 blocks
    workers.step()
    assert workers.scheduler._admission._entitled is large and large.status is SequenceStatus.WAITING
    for cache_id in (1, 2):
        workers.lose(cache_id)
    for sequence in rich:
        workers.scheduler.cancel(sequence.seq_id)
    small = make_sequence(100, 6, 4)
    ask(small, client=10)  # the only one that is left
    workers.scheduler.add(small)
    run(workers, 20)
    assert small.output_token_ids == expected_output(small)
    workers.add()
    workers.run_until_idle()
    assert large.output_token_ids == expected_output(large)


def test_waiting_for_a_worker_that_is_missing_is_no_stall() -> None:
    workers = PartedWorkers(2)
    large = make_sequence(1, 30, 10)
    workers.scheduler.add(large)
    workers.lose(1)
    run(workers, 3)
    waiting = EngineCounts(1, 0, 0, 5, 0, True)
    assert progress_of(workers.scheduler.session, waiting, 2) is None
    workers.add()
    assert workers.scheduler.next_to_open() == [large]
    assert progress_of(workers.scheduler.session, waiting, 2) is not None


def test_a_worker_that_has_left_for_good_is_not_waited_for() -> None:
    workers = PartedWorkers(2)
    workers.scheduler.give_up_cache(1)
    run(workers, 2)
    assert workers.caches.keys() == {0}
    with pytest.raises(CapacityError, match="44 tokens need 11 KV cache blocks, all caches together have 10"):
        workers.scheduler.add(make_sequence(1, 34, 10))


def test_one_whose_worker_does_not_come_back_ends_with_both_numbers() -> None:
    workers = PartedWorkers(2)
    workers.scheduler.add(make_sequence(1, 30, 10))
    run(workers, 5)
    workers.lose(1)
    run(workers, 5)
    timeout_s = workers.scheduler.limits.return_timeout_s
    assert workers.scheduler.expire(time.monotonic() + timeout_s - 10.0) == []
    workers.scheduler._placement.expect(0, 0.0)
    [output] = workers.scheduler.expire(time.monotonic() + timeout_s + 1.0)
    assert isinstance(output.error, CapacityError)
    assert "needs 10 KV cache blocks, of those that are left all caches together have 6" in str(output.error)


@pytest.mark.parametrize("is_away", [False, True])
def test_what_must_be_whole_is_refused_at_once_also_while_a_worker_is_away(is_away: bool) -> None:
    workers = PartedWorkers(2)
    if is_away:
        workers.lose(1)
    answer = make_sequence(1, 30, 10)
    answer.group_id = 7
    with pytest.raises(CapacityError, match="cache has 6, and one of several answers"):
        workers.scheduler.add(answer)
    workers.scheduler.add(make_sequence(2, 30, 10))  # it may wait for the other one


def test_a_worker_that_others_cannot_replace_while_one_is_away_stays() -> None:
    workers = PartedWorkers(3)
    workers.scheduler.add(make_sequence(1, 30, 10))  # 10 blocks
    workers.lose(2)
    workers.scheduler.give_up_cache(1)
    reason = workers.scheduler.why_needed()
    assert reason == "a request needs 10 KV cache blocks, of those that would be left all caches together have 6"


def test_one_that_only_a_worker_which_leaves_could_hold_whole_is_divided_among_the_others() -> None:
    workers = PartedWorkers(1, num_blocks=12)
    long = make_sequence(1, 10, 28)  # 10 blocks: more than another cache has
    workers.scheduler.add(long)
    workers.step()
    workers.num_blocks = NUM_BLOCKS
    for _ in range(2):
        workers.add()
    workers.scheduler.give_up_cache(0)
    large = make_sequence(2, 30, 8)  # 10 blocks
    workers.scheduler.add(large)
    run(workers, 4)
    assert large.divided is not None and set(large.divided.cache_ids) == {1, 2} and 0 in workers.caches
    workers.run_until_idle()
    assert [each.output_token_ids for each in (long, large)] == [expected_output(each) for each in (long, large)]


def test_what_no_worker_has_room_for_is_refused() -> None:
    workers = PartedWorkers(2)
    workers.scheduler._placement.expect(0, 0.0)  # nobody is missing
    with pytest.raises(CapacityError, match="60 tokens need 15 KV cache blocks, all caches together have 12"):
        workers.scheduler.add(make_sequence(1, 40, 20))


def crowd(workers: PartedWorkers, num_rich: int, max_tokens: int) -> list[Sequence]:
    """One client fills both KV caches."""
    rich = [make_sequence(seq_id, 4, max_tokens) for seq_id in range(1, 1 + num_rich)]
    for sequence in rich:
        ask(sequence, client=1)
        workers.scheduler.add(sequence)
    run(workers, 3)
    assert all(each.num_available_blocks == 0 for each in workers.scheduler.session.ledgers.values())
    return rich


def arrive(workers: PartedWorkers, seq_id: int, prompt_len: int, max_tokens: int) -> Sequence:
    """From a client of its own."""
    sequence = make_sequence(seq_id, prompt_len, max_tokens)
    ask(sequence, client=seq_id)
    workers.scheduler.add(sequence)
    return sequence


@pytest.mark.parametrize("num_large", [1, 4, 9])
def test_a_small_newcomer_does_not_wait_behind_others_that_need_several_caches(num_large: int) -> None:
    workers = PartedWorkers(2, num_blocks=12)
    rich = crowd(workers, 4, 20)  # 6 blocks each
    for number in range(num_large):  # each needs 16 blocks, more than it has a right to
        arrive(workers, 10 + number, 50, 14)
    small = arrive(workers, 100, 6, 4)
    run(workers, 8)
    assert small.output_token_ids, "it takes the place of a rich one"
    assert sum(each.status is SequenceStatus.RUNNING for each in rich) == 3
    workers.run_until_idle()
    assert not any(each.error for each in workers.outputs)


def test_a_newcomer_that_needs_several_caches_takes_room_in_all_of_them() -> None:
    workers = PartedWorkers(3, num_blocks=12)
    rich = crowd(workers, 6, 20)  # 6 blocks each
    large = arrive(workers, 10, 30, 20)  # 13 blocks
    run(workers, 8)
    assert large.output_token_ids and large.divided is not None
    assert sum(each.status is SequenceStatus.RUNNING for each in rich) == 3
    workers.run_until_idle()
    assert [each.output_token_ids for each in (*rich, large)] == [expected_output(each) for each in (*rich, large)]


def test_a_refused_part_is_an_error_of_its_worker() -> None:
    openings = PartOpenings()
    openings.expect([NewSequence(1, "", (), 8, part=range(0, 8), cache_id=each) for each in (0, 1)])
    assert openings.note(SequenceOpened(1, num_held_blocks=2, cache_id=0)) is None
    with pytest.raises(PeerError, match="a part of sequence 1 was refused: no room"):
        openings.note(SequenceOpened(1, error="no room", cache_id=1))
    openings.lose(1)
    whole = SequenceOpened(1, num_held_blocks=3, cache_id=0)
    assert openings.note(whole) is whole, "it is opened again, as a whole"
