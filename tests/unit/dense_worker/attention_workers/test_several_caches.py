"""The scheduler with several KV caches that come, go and are given up, without a model: tokens depend on positions."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.attn_worker.cache.build_cache import build_cache
from services.attn_worker.cache.kv_cache import KVCache
from services.common.errors import PeerError, RequestAborted
from services.dense_worker.attention_workers.plan_splitter import PlanSplitter, SplitPlan
from services.dense_worker.attention_workers.spread_placement import SpreadPlacement
from services.dense_worker.engine.attachment import AttachedCache, Attachment
from services.dense_worker.engine.limits import Policy, SchedulerLimits
from services.dense_worker.engine.placement import Placement
from services.dense_worker.engine.scheduler import Scheduler
from services.dense_worker.engine.sequence import SUSPECT_CRASHES, Sequence, SequenceOutput, SequenceStatus
from services.dense_worker.engine.session import ScheduledStep, Session
from services.dense_worker.features.fork_policy import ParallelAnswers
from services.step import PlanAccepted, RaggedTokens, SequenceOpened, StepResult
from tests.support.dense.scheduler_cluster import (
    BLOCK_SIZE,
    MAX_MODEL_LEN,
    expected_output,
    make_sequence,
    sample,
)
from tests.support.dense.sequences import ask
from tests.support.examples import examples
from tests.support.plans import make_plan

NUM_BLOCKS = 24
MEANINGLESS = 999


def new_cache(num_blocks: int = NUM_BLOCKS) -> KVCache:
    return build_cache(num_blocks, BLOCK_SIZE, MAX_MODEL_LEN)


class InTurn(SpreadPlacement):
    def choose(self, sequence: Sequence, fitting: SequenceOf[int], session: Session) -> int:
        return (sequence.seq_id + 1) % 2


class Workers:
    """A scheduler with the KV caches of several attention workers, one plan ahead."""

    def __init__(
        self,
        num_workers: int,
        policy: Policy = "guaranteed_no_evict",
        num_blocks: int = NUM_BLOCKS,
        placement: Placement | None = None,
    ) -> None:
        self.caches = {index: new_cache(num_blocks) for index in range(num_workers)}
        self.next_id = num_workers
        self.num_blocks = num_blocks
        limits = SchedulerLimits(6, 16, MAX_MODEL_LEN, 1000, policy)
        self.scheduler = Scheduler(limits, forks=ParallelAnswers(), placement=placement or SpreadPlacement())
        caches = tuple(AttachedCache(each, num_blocks, num_blocks, {}, is_empty=True) for each in range(num_workers))
        attachment = Attachment(1, 1, {}, BLOCK_SIZE, caches, MAX_MODEL_LEN)
        self.scheduler.begin(attachment)
        self.splitter = PlanSplitter({})
        self.in_flight: tuple[ScheduledStep, SplitPlan] | None = None
        self.outputs: list[SequenceOutput] = []
        self.opening: list[Sequence] = []

    def step(self, *, answers_openings: bool = True) -> None:
        """Does the work of `Engine._step`, of the client, and of all attention workers."""
        chosen = self.scheduler.next_to_open()
        if (openings := self.scheduler.plan_openings()) is not None:  # no answer comes before it is sent
            self.splitter.split(openings)
        self.opening += [each for each in chosen if each.status is SequenceStatus.OPENING]
        if answers_openings:
            for sequence in self.opening:
                self.open(sequence)
            self.opening.clear()
        published = self.scheduler.schedule()
        current = None
        if published is not None:
            current = published, self.splitter.split(published.plan)
        if self.in_flight is not None:
            self.complete(*self.in_flight)
        self.in_flight = current
        for cache_id in self.scheduler.empty_caches():
            self.lose(cache_id, is_crash=False)
        self.check()

    def open(self, sequence: Sequence) -> None:
        self.scheduler.opened(self.caches[sequence.cache_id].open_sequence(sequence.describe()))

    def complete(self, published: ScheduledStep, split: SplitPlan) -> None:
        plan = published.plan
        answering = [each for each in split.parts if each in self.caches and split.parts[each].frees_blocks]
        if plan.frees_blocks and not answering:
            self.outputs += self.scheduler.accepted(PlanAccepted(plan.step_id, cache_id=-1))
        for cache_id, part in split.parts.items():
            if cache_id in self.caches and part.is_step:
                for new in part.new_sequences:
                    if new.starts_empty:
                        assert new.seq_id in part.entries.seq_ids, "a plan opens those that it runs"
                        assert new.seq_id not in self.caches[cache_id].orphaned_blocks, "each is opened once"
                        self.caches[cache_id].open_sequence(new)
                step = self.caches[cache_id].plan_step(part)
                assert not step.errors, "both sides must agree on lengths and blocks"
                self.caches[cache_id].commit_step()
                if part.frees_blocks:
                    is_last = cache_id == answering[-1]
                    answer = PlanAccepted(plan.step_id, step.num_freed_blocks, cache_id=cache_id, is_last=is_last)
                    self.outputs += self.scheduler.accepted(answer)
        self.outputs += self.scheduler.update(published, self.sample(published, split)).others

    def sample(self, published: ScheduledStep, split: SplitPlan) -> StepResult:
        """The model's tokens; for sequences whose attention worker has gone before the end of the step, others."""
        tokens = sample(published.plan).token_ids
        rows = [tokens.of(index) for index in range(len(tokens))]
        gone = {
            each for index, part in split.parts.items() if index not in self.caches for each in part.entries.seq_ids
        }
        seq_ids = published.plan.entries.seq_ids.tolist()
        pairs = zip(seq_ids, rows, strict=True)
        return StepResult(
            RaggedTokens.from_rows([MEANINGLESS] * len(row) if each in gone else row for each, row in pairs)
        )

    def lose(self, cache_id: int, *, is_crash: bool = True) -> None:
        del self.caches[cache_id]
        self.splitter.forget(cache_id)
        self.opening = [each for each in self.opening if each.cache_id != cache_id]
        self.outputs += self.scheduler.lose_cache(cache_id, is_crash=is_crash)

    def computes(self, seq_id: int) -> bool:
        """Whether the step under way has a sequence."""
        return self.in_flight is not None and seq_id in self.in_flight[0].plan.entries.seq_ids.tolist()

    def add(self) -> int:
        cache_id, self.next_id = self.next_id, self.next_id + 1
        self.caches[cache_id] = new_cache(self.num_blocks)
        self.scheduler.add_cache(AttachedCache(cache_id, self.num_blocks, self.num_blocks, {}, is_empty=True))
        return cache_id

    def check(self) -> None:
        session, ledgers = self.scheduler.session, self.scheduler.session.ledgers
        assert session.num_opening_rows == sum(each.sequence.num_rows for each in session.openings.values())
        assert ledgers.keys() == self.caches.keys()
        for cache_id, ledger in ledgers.items():
            assert ledger.num_available_blocks >= 0
            assert ledger.num_free_blocks <= self.caches[cache_id].num_free_blocks, "it must never promise too much"

    def run_until_idle(self) -> None:
        for _ in range(5000):
            self.step()
            if not (self.in_flight or self.scheduler.num_running or self.scheduler.num_waiting):
                break
        else:
            raise AssertionError("not idle after 5000 steps")
        self.step()
        self.step()
        for cache_id, cache in self.caches.items():
            cache.check_integrity()
            assert (cache.num_sequences, cache.num_free_blocks) == (0, cache.num_blocks)
            ledger = self.scheduler.session.ledgers[cache_id]
            assert (ledger.num_free_blocks, ledger.num_reserved_blocks) == (cache.num_blocks, 0)


EVENTS = st.lists(
    st.tuples(
        st.integers(0, 60), st.sampled_from(["lose", "add", "give up", "crash", "cancel", "flush"]), st.integers(0, 12)
    ),
    max_size=6,
)
REQUESTS = st.lists(
    st.tuples(st.integers(1, 40), st.integers(1, 20), st.booleans(), st.integers(0, 3)), min_size=1, max_size=12
)


@settings(max_examples=examples(150), deadline=None)
@given(
    REQUESTS,
    EVENTS,
    st.sampled_from(["guaranteed_no_evict", "max_utilization"]),
    st.integers(1, 3),
    st.booleans(),
    st.integers(1, 3),
)
def test_every_sequence_gets_its_tokens_wherever_it_goes(
    arrivals: list[tuple[int, int, bool, int]],
    events: list[tuple[int, str, int]],
    policy: Policy,
    num_workers: int,
    have_same_prefix: bool,
    answer_every: int,
) -> None:
    workers, sequences, cancelled, number = Workers(num_workers, policy), list[Sequence](), set[int](), 0

    def step() -> None:
        nonlocal number
        number += 1
        for at, event, choice in events:
            if at != number:
                continue
            present = [each for each in workers.caches if each not in workers.scheduler.session.draining]
            if event == "add":
                workers.add()
            elif event == "flush":
                workers.scheduler.forget_prefixes()
            elif event == "cancel":
                live = [each.seq_id for each in sequences if each.status is not SequenceStatus.FINISHED]
                if live:
                    cancelled.add(live[choice % len(live)])
                    workers.scheduler.cancel(live[choice % len(live)])
            elif len(present) > 1:
                chosen = present[choice % len(present)]
                if event == "give up":
                    workers.scheduler.give_up_cache(chosen)
                else:
                    workers.lose(chosen, is_crash=event == "crash")
        workers.step(answers_openings=number % answer_every == 0)

    for seq_id, (prompt_len, max_tokens, can_stop, gap) in enumerate(arrivals, start=1):
        sequences.append(make_sequence(seq_id, prompt_len, max_tokens, can_stop=can_stop))
        if not have_same_prefix:
            ask(sequences[-1], prompt_token_ids=[prompt_len, *sequences[-1].spec.prompt_token_ids[1:]])
        sequences[-1].group_id = prompt_len  # so that some are answers to one prompt
        workers.scheduler.add(sequences[-1])
        for _ in range(gap):
            step()
    while number < 61:
        step()
    workers.run_until_idle()
    assert not workers.scheduler.session.draining, "what is given up becomes empty"
    ended = {each.sequence.seq_id for each in workers.outputs if isinstance(each.error, RequestAborted)}
    assert not ended or sum(event == "crash" for _, event, _ in events) > SUSPECT_CRASHES
    for sequence in sequences:
        if sequence.seq_id not in cancelled | ended:
            assert sequence.output_token_ids == expected_output(sequence)


def test_a_worker_that_dies_takes_only_its_own_sequences() -> None:
    workers = Workers(2)
    sequences = [make_sequence(seq_id, 5 + seq_id, 20) for seq_id in range(1, 5)]
    for sequence in sequences:
        workers.scheduler.add(sequence)
    for _ in range(6):
        workers.step()
    assert {each.cache_id for each in sequences} == {0, 1}
    others = {each: len(each.output_token_ids) for each in sequences if each.cache_id == 0}
    workers.lose(1)
    for _ in range(3):
        workers.step()
    for sequence, num_before in others.items():
        assert len(sequence.output_token_ids) == num_before + 3, "a token in each step, as before"
    workers.run_until_idle()
    assert [each.output_token_ids for each in sequences] == [expected_output(each) for each in sequences]


def test_one_that_no_step_has_run_yet_is_not_blamed_for_the_end_of_its_worker() -> None:
    workers = Workers(2, placement=InTurn())
    sequences = [make_sequence(seq_id, 16, 4) for seq_id in range(1, 6)]
    for each in sequences:
        ask(each, prompt_token_ids=[each.seq_id] * 16)
    workers.scheduler.add(sequences[0])
    for _ in range(3):
        workers.step()
    for each in sequences[1:]:
        workers.scheduler.add(each)
    workers.step()  # of 16 tokens
    starting = workers.scheduler.session.starting.keys()
    lost = [each for each in sequences[1:] if each.seq_id in starting and each.cache_id == 1]
    assert lost
    workers.lose(1)
    assert not starting & {each.seq_id for each in lost} and not any(each.num_crashes for each in lost)
    workers.run_until_idle()
    assert [each.output_token_ids for each in sequences] == [expected_output(each) for each in sequences]


def test_a_sequence_that_lacks_blocks_takes_them_from_others_of_its_worker() -> None:
    """The last sequence of all is in the other cache, and goes on."""
    workers = Workers(2, "max_utilization", num_blocks=12, placement=InTurn())
    sequences = [make_sequence(*each) for each in ((1, 20, 20), (2, 9, 14), (3, 20, 20), (4, 9, 14))]
    for sequence in sequences:
        workers.scheduler.add(sequence)
    workers.step()
    assert [each.cache_id for each in sequences] == [0, 1, 0, 1]
    preempted = set[int]()
    for _ in range(40):
        workers.step()
        preempted |= {each.seq_id for each in sequences if each.status is SequenceStatus.WAITING}
    assert preempted == {3}
    workers.run_until_idle()
    assert [each.output_token_ids for each in sequences] == [expected_output(each) for each in sequences]


def test_what_an_earlier_dense_worker_left_is_closed_in_every_cache_even_if_it_has_no_blocks() -> None:
    scheduler = Scheduler(SchedulerLimits(6, 16, MAX_MODEL_LEN, 1000, "guaranteed_no_evict"))
    left = ({1: 0, 2: 3}, {3: 0, 4: 2})
    caches = tuple(AttachedCache(index, NUM_BLOCKS, NUM_BLOCKS, each) for index, each in enumerate(left))
    scheduler.begin(Attachment(1, 1, {}, BLOCK_SIZE, caches, MAX_MODEL_LEN))
    session = scheduler.session
    assert {each: session.orphan_caches[each] for each in session.orphaned_blocks} == {1: 0, 2: 0, 3: 1, 4: 1}
    scheduler.close_orphans()
    published = scheduler.schedule()
    assert published is not None and sorted(published.plan.close_seq_ids) == [1, 2, 3, 4]


def test_a_cache_that_a_waiting_request_needs_is_not_given_up() -> None:
    workers = Workers(1, num_blocks=8)
    workers.num_blocks = NUM_BLOCKS
    large = workers.add()
    running = make_sequence(1, 10 * BLOCK_SIZE, 8)
    workers.scheduler.give_up_cache(large)
    assert workers.scheduler.why_needed() is None
    workers.scheduler.add(running)
    reason = workers.scheduler.why_needed()
    assert reason is not None and reason.endswith("of those that would be left the cache has 8")
    workers.scheduler.give_up_cache(large, False)
    workers.run_until_idle()
    assert running.output_token_ids == expected_output(running)


def test_others_do_not_wait_behind_a_sequence_that_only_a_cache_that_is_given_up_could_hold() -> None:
    """It stays for a stream for which the other cache has no room, and is kept when that has ended."""
    workers = Workers(1, num_blocks=10)
    long = make_sequence(1, 8, 20)  # 7 blocks, which the other cache lacks
    workers.scheduler.add(long)
    workers.step()
    workers.num_blocks = 6
    workers.add()
    workers.scheduler.give_up_cache(0)
    large, small = make_sequence(2, 30, 8), make_sequence(3, 6, 4)  # 10 and 3 blocks
    for sequence in (large, small):
        workers.scheduler.add(sequence)
    while not small.output_token_ids:
        assert long.status is SequenceStatus.RUNNING, "the small one has waited for it"
        workers.step()
    assert large.status is SequenceStatus.WAITING
    assert workers.scheduler.why_needed(small) is None and workers.scheduler.why_needed(large) is not None
    workers.scheduler.give_up_cache(0, False)
    workers.run_until_idle()
    assert [each.output_token_ids for each in (long, large, small)] == [
        expected_output(each) for each in (long, large, small)
    ]


def test_others_do_not_wait_behind_a_sequence_whose_larger_cache_is_missing() -> None:
    """The dense worker was started again, and so far has found only the smaller caches."""
    workers = Workers(1)
    large, small = make_sequence(1, 10 * BLOCK_SIZE, 8), make_sequence(2, 6, 4)
    workers.scheduler.add(large)
    caches = (AttachedCache(0, 8, 8, {}), AttachedCache(1, 8, 8, {}))
    workers.scheduler.begin(Attachment(1, 2, {}, BLOCK_SIZE, caches, MAX_MODEL_LEN))
    workers.caches = {0: new_cache(8), 1: new_cache(8)}
    ask(small, client=1)
    workers.scheduler.add(small)
    for _ in range(10):
        workers.step()
    assert small.output_token_ids == expected_output(small)
    workers.num_blocks, workers.next_id = NUM_BLOCKS, 2
    workers.add()
    workers.run_until_idle()
    assert large.output_token_ids == expected_output(large)


def test_a_sequence_that_moves_names_the_cache_it_has_left_until_it_runs_elsewhere() -> None:
    workers = Workers(1)
    sequence = make_sequence(1, 20, 30)
    workers.scheduler.add(sequence)
    workers.step()
    assert sequence.describe().leaves_cache_id is None
    target, other = workers.add(), workers.add()
    workers.scheduler.give_up_cache(0)
    while sequence.cache_id == 0:  # the cache that it leaves closes it first
        workers.step()
    assert sequence.cache_id == target and sequence.describe().leaves_cache_id == 0
    workers.lose(target)
    assert sequence.describe().leaves_cache_id is None  # it ran there, and is to be computed again
    workers.run_until_idle()
    assert sequence.output_token_ids == expected_output(sequence) and other in workers.caches


def test_a_sequence_goes_on_to_move_when_its_new_worker_dies_while_it_copies() -> None:
    workers = Workers(1)
    sequence = make_sequence(1, 20, 30)
    workers.scheduler.add(sequence)
    workers.step()
    target, _ = workers.add(), workers.add()
    workers.scheduler.give_up_cache(0)
    workers.open = lambda sequence: None  # type: ignore[method-assign]  # no answer: it is copying
    while sequence.status is not SequenceStatus.OPENING:
        workers.step()
    workers.step()
    assert 0 in workers.caches, "it is read from until the sequence has been opened"
    assert (sequence.cache_id, sequence.describe().leaves_cache_id) == (target, 0)
    workers.lose(target)
    del workers.open
    [again] = workers.scheduler.next_to_open()
    assert again is sequence and again.describe().leaves_cache_id == 0
    workers.open(again)
    workers.run_until_idle()
    assert sequence.output_token_ids == expected_output(sequence)


def test_a_sequence_that_is_cancelled_while_it_copies_holds_up_nobody() -> None:
    workers = Workers(1)
    cancelled, other = make_sequence(1, 20, 30), make_sequence(2, 12, 30)
    for sequence in (cancelled, other):
        workers.scheduler.add(sequence)
    workers.step()
    workers.add()
    workers.scheduler.give_up_cache(0)
    open_now, waiting = workers.open, list[Sequence]()
    workers.open = waiting.append  # type: ignore[method-assign]  # no answer: it is copying
    while not waiting:
        workers.step()
    assert waiting == [cancelled]
    workers.scheduler.cancel(cancelled.seq_id)
    workers.open = open_now  # type: ignore[method-assign]
    workers.step()
    workers.open(cancelled)  # the answer comes all the same
    workers.run_until_idle()
    assert other.output_token_ids == expected_output(other) and 0 not in workers.caches


def test_a_token_of_a_step_that_dies_after_its_sequence_has_left_is_not_believed() -> None:
    workers = Workers(1)
    sequence = make_sequence(1, 20, 30)
    workers.scheduler.add(sequence)
    for _ in range(5):
        workers.step()
    workers.add()
    workers.scheduler.give_up_cache(0)
    workers.scheduler.next_to_open()  # it leaves while a step runs it
    assert workers.in_flight is not None and sequence.status is SequenceStatus.WAITING
    workers.lose(0)
    workers.run_until_idle()
    assert sequence.output_token_ids == expected_output(sequence)


@pytest.mark.parametrize("has_ended", [False, True])
def test_errors_of_a_lost_worker_that_come_late_end_nobody(has_ended: bool) -> None:
    """A step has found that it is gone, while its answer to this step was on its way."""
    workers = Workers(3)
    sequences = [make_sequence(seq_id, 5 + seq_id, 20) for seq_id in range(1, 6)]
    for sequence in sequences:
        workers.scheduler.add(sequence)
    for _ in range(4):
        workers.step()
    assert workers.in_flight is not None
    plan = workers.in_flight[0].plan
    [errors, *_] = [
        {each.seq_id: "no room"}
        for each in sequences
        if each.cache_id == 1 and each.seq_id in plan.entries.seq_ids.tolist()
    ]
    assert not plan.frees_blocks, "nobody awaits the answers to this step, but for errors"
    workers.lose(1)
    if has_ended:
        workers.step()
    late = PlanAccepted(plan.step_id, errors=errors, cache_id=1, is_last=False)
    assert workers.scheduler.accepted(late) == []
    with pytest.raises(PeerError, match="was not published, or has been answered"):
        workers.scheduler.accepted(replace(late, step_id=plan.step_id + 100, cache_id=0))
    workers.run_until_idle()
    assert [each.output_token_ids for each in sequences] == [expected_output(each) for each in sequences]


def test_nothing_is_remembered_of_a_worker_that_has_gone() -> None:
    workers = Workers(2)
    for seq_id in range(1, 5):
        workers.scheduler.add(make_sequence(seq_id, 6, 20))
    workers.step()
    workers.step()
    assert set(workers.splitter._cache_of.values()) == {0, 1}
    workers.lose(1)
    assert set(workers.splitter._cache_of.values()) == {0}
    workers.run_until_idle()


def test_a_new_worker_gets_the_next_sequence() -> None:
    workers = Workers(1)
    for seq_id in (1, 2):
        workers.scheduler.add(make_sequence(seq_id, 20, 20))
    workers.step()
    assert workers.scheduler.num_waiting == 0
    workers.scheduler.add(make_sequence(3, 30, 20))
    workers.step()
    assert workers.scheduler.num_waiting == 1, "it has no room"
    new = workers.add()
    workers.step()
    assert [each.cache_id for each in workers.scheduler.session.running] == [0, 0, new]


def test_a_request_that_workers_die_of_ends_alone() -> None:
    """After two crashes it runs alone; the third one is its end. Others get their tokens."""
    workers = Workers(4)
    poison, other = make_sequence(1, 6, 20), make_sequence(2, 9, 20)
    for sequence in (poison, other):
        workers.scheduler.add(sequence)
    for _ in range(400):
        workers.step()
        if workers.computes(1) and poison.status is SequenceStatus.RUNNING:
            workers.lose(poison.cache_id)
            workers.add()
        if poison.status is SequenceStatus.FINISHED:
            break
    workers.run_until_idle()
    [error] = [each.error for each in workers.outputs if each.sequence is poison and each.error is not None]
    assert isinstance(error, RequestAborted) and str(error) == (
        "3 attention workers died while they computed this request"
    )
    assert other.output_token_ids == expected_output(other)


def test_a_request_that_has_seen_two_workers_die_goes_on() -> None:
    """It goes before all others, but not before the step that still had it has ended, and closed it where it was."""
    workers = Workers(3)
    sequences = [make_sequence(seq_id, 6, 20) for seq_id in (1, 2)]
    for sequence in sequences:
        workers.scheduler.add(sequence)
    for _ in range(2):
        while not (workers.computes(1) and sequences[0].status is SequenceStatus.RUNNING):
            workers.step()
        workers.lose(sequences[0].cache_id)
    assert sequences[0].is_suspect
    workers.run_until_idle()
    assert [each.output_token_ids for each in sequences] == [expected_output(each) for each in sequences]


def test_crashes_with_a_token_in_between_make_no_suspect() -> None:
    """Also where nobody is a suspect, and its further tokens are those of rows."""
    workers = Workers(4)
    sequence = make_sequence(1, 6, 20)
    workers.scheduler.add(sequence)
    for _ in range(3):
        num_tokens = len(sequence.output_token_ids)
        while not (workers.computes(1) and len(sequence.output_token_ids) > num_tokens):
            workers.step()
        assert sequence.num_crashes == 0
        workers.lose(sequence.cache_id)
        assert sequence.num_crashes == 1
    workers.run_until_idle()
    assert sequence.output_token_ids == expected_output(sequence)


def test_an_answer_that_does_not_fit_beside_its_first_one_is_opened_in_another_cache() -> None:
    """And those behind it, of other requests, do not wait."""
    scheduler = Scheduler(
        SchedulerLimits(8, 64, MAX_MODEL_LEN, 1000, "guaranteed_no_evict"),
        forks=ParallelAnswers(),
        placement=SpreadPlacement(),
    )
    caches = (AttachedCache(0, 10, 10, {}), AttachedCache(1, 10, 10, {}))
    scheduler.begin(Attachment(1, 1, {}, BLOCK_SIZE, caches, MAX_MODEL_LEN))
    answers = [make_sequence(seq_id, 17, 16) for seq_id in (1, 2)]  # 8 blocks each, 4 of them could be shared
    for sequence in answers:
        sequence.group_id = 1
        scheduler.add(sequence)
    scheduler.add(make_sequence(3, 4, 4))  # 2 blocks
    assert scheduler.next_to_open() == [*answers, scheduler.session.openings[3].sequence]
    assert [each.cache_id for each in answers] == [0, 1]
    assert not scheduler.session.to_fork, "the second one is not forked: it cannot be in another cache"
    assert [each.num_reserved_blocks for each in answers] == [8, 8], "it shares no blocks there"


def test_a_client_takes_blocks_where_its_sequence_has_its_own() -> None:
    """Another cache has room, but not for a sequence of an earlier dense worker."""
    limits = SchedulerLimits(8, 64, MAX_MODEL_LEN, 1000, "guaranteed_no_evict")
    scheduler = Scheduler(limits, placement=InTurn())
    caches = (AttachedCache(0, 30, 30, {}), AttachedCache(1, 30, 27, {9: 3}))
    scheduler.begin(Attachment(1, 1, {}, BLOCK_SIZE, caches, MAX_MODEL_LEN))
    for seq_id, num_tokens in ((2, 52), (3, 8), (4, 56)):  # 13 and 14 blocks in the second cache, which are all it has
        scheduler.add(make_sequence(seq_id, num_tokens - 3, 4))
    opened = scheduler.next_to_open()
    assert {each.seq_id: each.cache_id for each in opened} == {2: 1, 3: 0, 4: 1}
    for each in opened:
        scheduler.opened(SequenceOpened(each.seq_id, 0, 0, 0, 0))
    claimed = make_sequence(9, 33, 4)  # 9 blocks, of which it has 3
    ask(claimed, client=1)
    scheduler.add(claimed)
    assert scheduler.next_to_open() == [claimed]
    assert claimed.cache_id == 1 and scheduler.num_preemptions == 1


def test_the_id_of_a_beam_that_has_ended_is_that_of_a_new_one_in_the_same_plan() -> None:
    """Attention workers close before they fork."""
    splitter = PlanSplitter({1: 0, 2: 0, 7: 1})
    first = splitter.split(make_plan([(1, 1, 8), (2, 1, 8)], close_seq_ids=[2, 7], forks=[(1, 2, 8)]))
    assert {cache_id: part.close_seq_ids for cache_id, part in first.parts.items()} == {0: (2,), 1: (7,)}
    second = splitter.split(make_plan([(1, 1, 9), (2, 1, 9)]))
    assert list(second.parts) == [0] and second.parts[0].entries.seq_ids.tolist() == [1, 2]
