"""The scheduler with sequences that read an encoder's output, and the real KV cache with slots for these outputs."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.attn_worker.cache.build_cache import SourceSlots, build_cache
from services.attn_worker.cache.cached_sequence import PlannedStep
from services.common.families.shape import LayerHeads
from services.dense_worker.attention_workers.spread_placement import SpreadPlacement
from services.dense_worker.encoders.encoder import Encoder
from services.dense_worker.encoders.encoder_runs import EncoderRuns
from services.dense_worker.encoders.run_in_parts import RunInParts
from services.dense_worker.encoders.source.runnable_encoder import SourceInput
from services.dense_worker.engine.attachment import AttachedCache, Attachment
from services.dense_worker.engine.limits import Policy, SchedulerLimits
from services.dense_worker.engine.placement import Placement
from services.dense_worker.engine.scheduler import Scheduler
from services.dense_worker.engine.sequence import Sequence
from services.dense_worker.engine.session import ScheduledStep
from services.dense_worker.engine.waiting_queue import WaitingQueue
from services.dense_worker.features.feature import Feature
from services.dense_worker.features.source.alignment import Alignment
from services.dense_worker.features.source.sequence_source import Readers, SequenceSource
from services.pb import source_pb2
from services.step import NewSequence, PlanAccepted, SequenceOpened, SequenceSpec, SourceRef, StepPlan
from tests.support.dense.scheduler_cluster import (
    BLOCK_SIZE,
    MAX_MODEL_LEN,
    Cluster,
    expected_output,
    make_sequence,
    new_attachment,
)
from tests.support.dense.sequences import ask
from tests.support.examples import examples

MAX_SOURCE_LEN = 40


class OneRowEncoder:
    """An encoder whose output for all inputs is one row; it writes down which it has computed."""

    def __init__(self) -> None:
        self.computed: list[str] = []

    def size(self, each: SourceInput) -> int:
        return each.num_rows

    def output_bytes(self, each: SourceInput) -> int:
        return 4

    def begin(self, inputs: Iterable[SourceInput]) -> RunInParts:
        def parts() -> Generator[None, None, list[torch.Tensor]]:
            self.computed += [each.hash for each in inputs]
            yield
            return [torch.zeros(1) for _ in inputs]

        return RunInParts(parts(), None)


class RunningEncoder(Feature):
    """What `SourceFeature` does between steps."""

    sequence_type = SequenceSource

    def __init__(self, runs: EncoderRuns[SourceInput]) -> None:
        self._runs = runs

    def provide(self, waiting: WaitingQueue, oldest_step_id: int | None) -> Iterable[Sequence]:
        return self._runs.run(waiting, oldest_step_id)


def new_runs(encoder: Encoder[SourceInput] | None = None) -> EncoderRuns[SourceInput]:
    return EncoderRuns("source", encoder or OneRowEncoder(), 2**20, 2**20)


def new_scheduler(
    limits: SchedulerLimits, runs: EncoderRuns[SourceInput], placement: Placement | None = None
) -> Scheduler:
    scheduler = Scheduler(limits, features=[RunningEncoder(runs)], placement=placement)
    runs.start(scheduler.handle)
    return scheduler


class SourceCluster(Cluster):
    """The same with a slot for each sequence's output of an encoder. The cache gets plans and openings in their order.
    """

    def __init__(
        self,
        policy: Policy,
        num_blocks: int,
        max_num_seqs: int,
        budget: int,
        encoder: Encoder[SourceInput] | None = None,
    ) -> None:
        super().__init__(policy, num_blocks, max_num_seqs, budget)
        slots = SourceSlots(max_num_seqs, MAX_SOURCE_LEN)
        self.cache = build_cache(num_blocks, BLOCK_SIZE, MAX_MODEL_LEN, sources=slots)
        attachment = replace(new_attachment(self.cache), max_num_sequences=max_num_seqs)
        self.runs = new_runs(encoder)
        self.scheduler = new_scheduler(self.limits, self.runs)
        self.scheduler.begin(attachment)
        self._steps = deque[PlannedStep]()

    def answer_opens(self) -> None:
        while self._opening:
            self.scheduler.opened(self.cache.open_sequence(self._opening.popleft().describe()))

    def check(self, plan: StepPlan) -> None:
        check_tokens(plan, self.limits.max_num_batched_tokens)
        self._steps.append(self.cache.plan_step(plan))

    def _complete(self, published: ScheduledStep) -> None:
        plan, step = published.plan, self._steps.popleft()
        assert not step.errors, "both sides must agree on lengths, blocks and outputs of encoders"
        self.cache.commit_step()
        if plan.frees_blocks:
            self.outputs += self.scheduler.accepted(PlanAccepted(plan.step_id, step.num_freed_blocks))
        self.outputs += self.scheduler.update(published, self.result_of(plan))


def check_tokens(plan: StepPlan, budget: int) -> None:
    """The numbers of tokens and of rows of encoders' outputs that any plan may have."""
    num_tokens, seq_ids = plan.entries.num_tokens.tolist(), plan.entries.seq_ids.tolist()
    assert min(num_tokens, default=1) >= 1 and sum(num_tokens) <= budget
    num_rows = [num_rows for _, num_rows in plan.extra_rows]
    assert len(num_rows) == 1 or sum(num_tokens) + sum(num_rows) <= budget, "only one long output may exceed it"
    assert {seq_id for seq_id, _ in plan.extra_rows} <= set(seq_ids), "who reads an output has it written"


@dataclass(frozen=True)
class Reading:
    """What the sequences of a worker share."""

    runs: EncoderRuns[SourceInput] = field(default_factory=new_runs)
    readers: Readers = field(default_factory=Readers)

    def feature(
        self, source: int, num_rows: int, data: torch.Tensor | None = None, **options: Any
    ) -> SequenceSource:
        read = SourceInput(f"{source:064x}", torch.zeros(1) if data is None else data, num_rows)
        return SequenceSource(read, self.runs, self.readers, **options)


def reader(
    reading: Reading,
    seq_id: int,
    prompt_len: int,
    max_tokens: int,
    source: int,
    num_rows: int,
    priority: int = 0,
    **options: Any,
) -> Sequence:
    """A sequence that reads the encoder's output for input number `source`."""
    sequence = make_sequence(seq_id, prompt_len, max_tokens)
    ask(sequence, source=SourceRef(f"{source:064x}", num_rows), priority=priority)
    sequence.features = (reading.feature(source, num_rows, **options),)
    return sequence


requests = st.lists(
    st.tuples(
        st.integers(1, 12),  # prompt
        st.integers(1, 24),  # max_tokens
        st.integers(0, 5),  # number of its input
        st.integers(0, 2),  # steps before the next request
        st.one_of(st.none(), st.integers(0, 12)),  # the number of steps after which it is cancelled
    ),
    min_size=1,
    max_size=12,
)


@settings(max_examples=examples(150), deadline=None)
@given(
    requests,
    st.lists(st.integers(1, MAX_SOURCE_LEN), min_size=6, max_size=6),
    st.sampled_from(["guaranteed_no_evict", "max_utilization"]),
    st.integers(10, 24),
    st.integers(1, 6),
    st.integers(6, 40),
)
def test_no_plan_has_an_entry_without_tokens_or_is_longer_than_its_budget(
    arrivals: list[tuple[int, int, int, int, int | None]],
    lengths: list[int],
    policy: Policy,
    num_blocks: int,
    max_num_seqs: int,
    budget: int,
) -> None:
    cluster, sequences, cancels = SourceCluster(policy, num_blocks, max_num_seqs, budget), [], {}
    reading = Reading(cluster.runs)
    num_steps = 0
    for seq_id, (prompt_len, max_tokens, source, gap, cancel_after) in enumerate(arrivals, start=1):
        sequences.append(reader(reading, seq_id, prompt_len, max_tokens, source, lengths[source]))
        cluster.scheduler.add(sequences[-1])
        if cancel_after is not None:
            cancels[seq_id] = num_steps + cancel_after
        for _ in range(gap):
            for each in [each for each, at in cancels.items() if at == num_steps]:
                cluster.scheduler.cancel(each)
            num_steps += 1
            cluster.step()
    cluster.run_until_idle()
    for sequence in sequences:
        if cancels.get(sequence.seq_id, num_steps) >= num_steps:
            assert sequence.output_token_ids == expected_output(sequence)


@pytest.mark.parametrize(("sources", "in_cache"), [((1, 1), ()), ((1, 2), (2,))])
def test_a_long_sound_leaves_no_tokens_to_others_in_its_step(sources: tuple[int, int], in_cache: tuple[int]) -> None:
    reading = Reading()
    scheduler = new_scheduler(SchedulerLimits(8, 512, 448, 1000, "guaranteed_no_evict"), reading.runs)
    scheduler.begin(Attachment(1, 1, {}, 16, (AttachedCache(0, 200, 200, {}),), 448, max_num_sequences=8))
    for seq_id, source in enumerate(sources, start=1):
        scheduler.add(reader(reading, seq_id, 4, 10, source, 1500))
    for sequence in scheduler.next_to_open():
        scheduler.opened(SequenceOpened(sequence.seq_id, 0, 0, 0, 0, has_extra_rows=sequence.seq_id in in_cache))
    first, second = scheduler.schedule(), scheduler.schedule()
    assert first is not None and second is not None
    assert first.plan.extra_rows == ((1, 1500),) and second.plan.extra_rows == ()
    assert [(entry.seq_id, entry.num_tokens) for entry in first.plan.entries] == [(1, 4)]
    assert sorted((entry.seq_id, entry.num_tokens) for entry in second.plan.entries) == [(1, 1), (2, 4)]


def test_a_plan_names_each_output_a_fixed_number_of_times(monkeypatch: pytest.MonkeyPatch) -> None:
    num_named, prefix_key = 0, SequenceSpec.prefix_key

    def count(spec: SequenceSpec) -> bytes:
        nonlocal num_named
        num_named += 1
        return prefix_key.fget(spec)

    reading = Reading()
    scheduler = new_scheduler(SchedulerLimits(60, 512, 448, 1000, "guaranteed_no_evict"), reading.runs)
    scheduler.begin(Attachment(1, 1, {}, 16, (AttachedCache(0, 200, 200, {}),), 448, max_num_sequences=60))
    for seq_id in range(1, 61):
        scheduler.add(reader(reading, seq_id, 1, 10, seq_id, 1500))
    for sequence in scheduler.next_to_open():  # the cache has every other output
        scheduler.opened(SequenceOpened(sequence.seq_id, 0, 0, 0, 0, has_extra_rows=sequence.seq_id % 2 == 0))
    monkeypatch.setattr(SequenceSpec, "prefix_key", property(count))
    assert scheduler.schedule() is not None
    assert num_named <= 4 * 60, "each sequence is compared with all others"


def test_an_output_stays_in_the_cache_for_those_that_count_on_it_in_a_plan() -> None:
    reading = Reading()
    scheduler = new_scheduler(SchedulerLimits(3, 8, 448, 1000, "max_utilization"), reading.runs)
    scheduler.begin(Attachment(1, 1, {}, 4, (AttachedCache(0, 100, 100, {}),), 448, max_num_sequences=3))
    writer, heir = reader(reading, 1, 20, 2, 1, 4), reader(reading, 3, 2, 2, 1, 4, priority=-2)
    other = reader(reading, 2, 4, 2, 2, 2, priority=-1)
    open_in(scheduler, writer)
    first = scheduler.schedule()
    assert first is not None and first.plan.extra_rows == ((1, 4),)
    for sequence in (heir, other):
        open_in(scheduler, sequence)
    session = scheduler.session
    session.release_reservation(other)
    session.ledger.take(session.ledger.num_available_blocks)  # so that it finds none
    second = scheduler.schedule()
    assert second is not None and second.plan.extra_rows == ()
    assert 3 in second.plan.entries.seq_ids.tolist(), "it counts on the output that the first one has written"
    assert second.plan.close_seq_ids == (2,)


def test_each_cache_gets_an_output_of_its_own() -> None:
    reading = Reading()
    scheduler = new_scheduler(SchedulerLimits(8, 64, 448, 1000, "guaranteed_no_evict"), reading.runs, SpreadPlacement())
    caches = tuple(AttachedCache(each, 100, 100, {}) for each in range(2))
    attached = Attachment(1, 1, {}, 16, caches, 448, max_num_sequences=8)
    scheduler.begin(attached)
    sequences = [reader(reading, seq_id, 2, 10, 1, 8) for seq_id in (1, 2)]
    for sequence in sequences:
        open_in(scheduler, sequence)
    assert [sequence.cache_id for sequence in sequences] == [0, 1], "for this test they are in different caches"
    planned = scheduler.schedule()
    assert planned is not None and planned.plan.extra_rows == ((1, 8), (2, 8))


@pytest.mark.parametrize("is_written", [True, False])
def test_a_sequence_with_an_alignment_has_the_output_in_its_first_step(is_written: bool) -> None:
    """Though the cache has it, or another sequence of the same step writes it."""
    reading = Reading()
    scheduler = new_scheduler(SchedulerLimits(8, 64, 448, 1000, "guaranteed_no_evict"), reading.runs)
    scheduler.begin(Attachment(1, 1, {}, 16, (AttachedCache(0, 100, 100, {}),), 448, max_num_sequences=8))
    request = source_pb2.Alignment(num_rows=8, heads=[source_pb2.AlignmentHead()], filter_width=7)
    alignment = Alignment(request, 2, {1: LayerHeads(1, 1, 8, is_cross=True)}, None)
    first = reader(reading, 1, 2, 10, 1, 8)
    aligned = reader(reading, 2, 2, 10, 1, 8, alignment=alignment, has_run=True)
    open_in(scheduler, first)
    if is_written:
        assert scheduler.schedule().plan.extra_rows == ((1, 8),)
    open_in(scheduler, aligned, has_extra_rows=is_written)
    planned = scheduler.schedule()
    assert planned.plan.extra_rows == (() if is_written else ((1, 8),))
    assert all(each.features[0].output is not None for each in (first, aligned))
    assert len(reading.runs._encoder.computed) == 1


@pytest.mark.parametrize("is_in_cache", [True, False])
def test_a_sequence_that_has_run_waits_for_the_encoder_only_if_the_cache_lacks_its_output(is_in_cache: bool) -> None:
    cluster = SourceCluster("guaranteed_no_evict", 40, 2, 40)
    reading = Reading(cluster.runs)
    if is_in_cache:
        cluster.scheduler.add(reader(reading, 1, 4, 3, 1, 8))
        cluster.run_until_idle()
        cluster.runs._outputs.clear()
    computed = cluster.runs._encoder.computed
    num_before = len(computed)
    sequence = reader(reading, 2, 4, 6, 1, 8, has_run=True)
    cluster.scheduler.add(sequence)
    cluster.run_until_idle()
    assert sequence.output_token_ids == expected_output(sequence)
    assert len(computed) - num_before == (0 if is_in_cache else 1)


def test_preempted_sequences_take_the_output_that_the_cache_still_has() -> None:
    """And a new attention worker, which has none, gets it anew."""
    cluster = SourceCluster("max_utilization", 40, 2, 40)
    reading = Reading(cluster.runs)
    sequence = reader(reading, 1, 4, 30, 1, 8)
    cluster.scheduler.add(sequence)
    for _ in range(4):
        cluster.step()
    assert sequence.output_token_ids and not sequence.features[0].pin, "what the cache has is not kept here as well"
    cluster.runs._outputs.clear()
    cluster.scheduler.session.preempt(sequence)
    for _ in range(6):
        cluster.step()
    assert len(cluster.runs._encoder.computed) == 1
    slots = SourceSlots(2, MAX_SOURCE_LEN)
    cluster.in_flight = None
    cluster._steps.clear()
    cluster.cache = build_cache(40, BLOCK_SIZE, MAX_MODEL_LEN, sources=slots)
    cluster.scheduler.begin(replace(new_attachment(cluster.cache), max_num_sequences=2))
    cluster.run_until_idle()
    assert sequence.output_token_ids == expected_output(sequence)
    assert len(cluster.runs._encoder.computed) == 2


@pytest.mark.parametrize("is_known", [True, False])
def test_a_sequence_is_opened_once_by_an_attention_worker_that_has_nothing(is_known: bool) -> None:
    """One that runs, and one that an earlier dense worker ran. Without the worker's word they are opened twice."""
    cluster = SourceCluster("guaranteed_no_evict", 40, 2, 40)
    reading = Reading(cluster.runs)
    running = reader(reading, 1, 4, 30, 1, 8)
    cluster.scheduler.add(running)
    for _ in range(4):
        cluster.step()
    assert running.output_token_ids
    cluster.runs._outputs.clear()
    cluster.in_flight = None
    cluster._steps.clear()
    cluster.cache = build_cache(40, BLOCK_SIZE, MAX_MODEL_LEN, sources=SourceSlots(2, MAX_SOURCE_LEN))
    cluster.scheduler.begin(replace(new_attachment(cluster.cache, is_empty=is_known), max_num_sequences=2))
    claimed = reader(reading, 2, 4, 6, 2, 8, has_run=True)
    cluster.scheduler.add(claimed)
    opened, open_in_cache = list[int](), cluster.cache.open_sequence

    def note(new: NewSequence, *arguments: Any) -> Any:
        opened.append(new.seq_id)
        return open_in_cache(new, *arguments)

    cluster.cache.open_sequence = note  # type: ignore[method-assign]
    cluster.run_until_idle()
    for sequence in (running, claimed):
        assert sequence.output_token_ids == expected_output(sequence)
    assert sorted(opened) == ([1, 2] if is_known else [1, 1, 2, 2])


def open_in(scheduler: Scheduler, sequence: Sequence, *, has_extra_rows: bool = False) -> None:
    scheduler.add(sequence)
    assert scheduler.next_to_open() == [sequence]
    scheduler.opened(SequenceOpened(sequence.seq_id, 0, 0, 0, 0, has_extra_rows=has_extra_rows))
