"""The engine thread with a scripted attention worker: which tokens may be delivered, and when."""

from __future__ import annotations

import gc
import queue
import threading
import time
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from services.common.engine_thread import IDLE_POLL_S
from services.common.errors import PeerError
from services.common.sampling_params import SamplingParams
from services.dense_worker.engine import engine as engine_module
from services.dense_worker.engine.attachment import Attachment
from services.dense_worker.engine.limits import SchedulerLimits
from services.dense_worker.engine.sequence import FinishReason, Sequence
from services.dense_worker.engine.step_report import StepReport
from services.step import NewSequence, PlanAccepted, SequenceOpened, StepPlan
from tests.support.clients.steady_stream import wait_until
from tests.support.dense.eager_drafting import EagerDrafting
from tests.support.dense.sequences import new_sequence
from tests.support.garbage import make_cycle
from tests.support.scripted_attention import (
    BAD,
    GOOD,
    TIMEOUT_S,
    FakeAttention,
    FakeRunner,
    RecordingAttention,
    SilentAttention,
    SlowRunner,
    started_engine,
)


@pytest.mark.parametrize("bad_step", [1, 2, 3])
def test_a_token_of_a_failed_row_is_never_delivered(bad_step: int) -> None:
    reports: queue.Queue[StepReport] = queue.Queue()
    attention = FakeAttention(bad_step)
    engine = started_engine(FakeRunner(), attention, reports, TIMEOUT_S)
    for seq_id in (GOOD, BAD):
        engine.submit(new_sequence(seq_id, f"r{seq_id}", [5, 6, 7], SamplingParams(), max_tokens=6))
    num_tokens = {GOOD: 0, BAD: 0}
    ends: dict[int, FinishReason] = {}
    while len(ends) < 2:
        report = reports.get(timeout=TIMEOUT_S)
        assert report.step_id >= 0, "the engine failed"
        for output in report.outputs:
            seq_id = output.sequence.seq_id
            assert seq_id not in ends, "nothing may follow an end"
            num_tokens[seq_id] += len(output.token_ids)
            if output.finish_reason is not None:
                ends[seq_id] = output.finish_reason
    engine.stop(TIMEOUT_S)
    assert ends == {GOOD: FinishReason.LENGTH, BAD: FinishReason.ERROR}
    assert num_tokens[GOOD] == 6
    assert num_tokens[BAD] <= bad_step - 1


def test_nothing_is_opened_after_a_suspect_before_its_token_can_get_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    events: list[str] = []

    class Attention(FakeAttention):
        def open(self, attachment: Attachment, new: NewSequence) -> None:
            events.append(f"open {new.seq_id}")
            super().open(attachment, new)

    class Reports(queue.Queue[StepReport]):
        def put(self, report: StepReport, *more: object) -> None:
            events.extend(f"token of {output.sequence.seq_id}" for output in report.outputs)
            super().put(report)

    clock = SimpleNamespace(monotonic=time.monotonic, sleep=lambda seconds: events.append("pause"))
    monkeypatch.setattr(engine_module, "time", clock)
    reports = Reports()
    engine = started_engine(FakeRunner(), Attention(bad_step=0), reports, TIMEOUT_S)
    for seq_id in (1, 2, 3):
        num_crashes = 2 if seq_id < 3 else 0
        engine.submit(new_sequence(seq_id, "", [5, 6], SamplingParams(), max_tokens=1, num_crashes=num_crashes))
    num_ends = 0
    while num_ends < 3:
        num_ends += sum(output.finish_reason is not None for output in reports.get(timeout=TIMEOUT_S).outputs)
    engine.stop(TIMEOUT_S)
    assert events == ["open 1", "token of 1", "pause", "open 2", "token of 2", "pause", "open 3", "token of 3"]


class NoDrafts(EagerDrafting):
    def draft(self, sequence: Sequence, max_num_tokens: int) -> list[int]:
        return []


def test_a_step_that_waited_for_tokens_is_published_before_these_are_delivered() -> None:
    events: list[str] = []

    class Attention(FakeAttention):
        def publish(self, attachment: Attachment, plan: StepPlan) -> None:
            events.extend(["plan"] * bool(plan.entries))
            super().publish(attachment, plan)

    class Reports(queue.Queue[StepReport]):
        def put(self, report: StepReport, *more: object) -> None:
            events.extend(["token"] * len(list(report.outputs)))
            super().put(report)

    reports = Reports()
    engine = started_engine(FakeRunner(), Attention(bad_step=0), reports, TIMEOUT_S, drafting=NoDrafts())
    engine.submit(new_sequence(1, "r1", [5, 6, 7], SamplingParams(), max_tokens=3))
    while not any(output.finish_reason for output in reports.get(timeout=TIMEOUT_S).outputs):
        pass
    engine.stop(TIMEOUT_S)
    assert events == ["plan", "plan", "token", "plan", "token", "token"]


def test_tokens_are_delivered_although_the_next_plan_cannot_be_published() -> None:
    class Attention(RecordingAttention):
        num_plans = 0

        def publish(self, attachment: Attachment, plan: StepPlan) -> None:
            self.num_plans += bool(plan.entries)
            if self.num_plans == 2:
                raise PeerError("the attention worker went away")
            super().publish(attachment, plan)

    attention, reports, seen = Attention(), queue.Queue[StepReport](), list[str | int]()
    observer = SimpleNamespace(
        on_step=lambda stats, started, outputs: seen.append(stats.num_output_tokens),
        on_handoff_abort=lambda: seen.append("abort"),
    )
    engine = started_engine(
        FakeRunner(), attention, reports, TIMEOUT_S, drafting=NoDrafts(), observers=[observer]
    )
    engine.submit(new_sequence(1, "r1", [5, 6, 7], SamplingParams(), max_tokens=3))
    assert attention.dropped.get(timeout=TIMEOUT_S) == "the attention worker went away"
    outputs = [output for report in list(reports.queue) for output in report.outputs]
    engine.stop(TIMEOUT_S)
    assert [output.token_ids for output in outputs] == [[9]]
    assert seen[:2] == [1, "abort"]  # observers know of the step, too


class SmallAttention(FakeAttention):
    """Has four blocks. Submits `second` when the first sequence is opened. A reopened one has a cached block."""

    def __init__(self, second: Sequence) -> None:
        super().__init__(bad_step=0)
        self.second = second
        self.num_opens = {1: 0, 2: 0}

    def open(self, attachment: Attachment, new: NewSequence) -> None:
        assert self.engine is not None
        if new.seq_id != self.second.seq_id:
            self.engine.submit(self.second)
        num_cached = self.num_opens[new.seq_id]
        self.num_opens[new.seq_id] += 1
        opened = SequenceOpened(
            new.seq_id, num_cached_tokens=4 * num_cached, num_pinned_blocks=num_cached, num_held_blocks=num_cached
        )
        self.engine.on_answer(attachment, opened)

    def run(self, attachment: Attachment, plan: StepPlan) -> None:
        assert self.engine is not None
        if plan.close_seq_ids:
            num_freed = 2 if plan.close_seq_ids == (1,) else 0
            self.engine.on_answer(attachment, PlanAccepted(plan.step_id, num_freed))


def test_a_sequence_preempted_before_its_first_step_is_reported_as_started_once() -> None:
    attention = SmallAttention(new_sequence(2, "r2", [5] * 12, SamplingParams(), max_tokens=2))
    reports: queue.Queue[StepReport] = queue.Queue()
    limits = SchedulerLimits(4, 4, 64, 100, "max_utilization")
    engine = started_engine(FakeRunner(), attention, reports, TIMEOUT_S, limits, num_blocks=4)
    engine.submit(new_sequence(1, "r1", [5] * 4, SamplingParams(), max_tokens=2))
    started, ended = [], []
    while len(ended) < 2:
        report = reports.get(timeout=TIMEOUT_S)
        assert report.step_id >= 0, "the engine failed"
        started += [sequence.seq_id for sequence in report.started]
        ended += [output.sequence.seq_id for output in report.outputs if output.finish_reason is not None]
    engine.stop(TIMEOUT_S)
    assert attention.num_opens == {1: 1, 2: 2}
    assert started == ended == [1, 2]


def test_a_sequence_that_arrives_during_a_step_is_opened_before_the_step_ends() -> None:
    runner, attention, reports = SlowRunner(), RecordingAttention(), queue.Queue()
    engine = started_engine(runner, attention, reports, TIMEOUT_S)
    engine.submit(new_sequence(1, "r1", [5, 6, 7], SamplingParams(), max_tokens=4))
    runner.launched.get(timeout=TIMEOUT_S)
    assert attention.opened.get(timeout=TIMEOUT_S) == 1
    engine.submit(new_sequence(2, "r2", [5, 6, 7], SamplingParams(), max_tokens=4))
    assert attention.opened.get(timeout=TIMEOUT_S) == 2
    assert not runner.has_ended.is_set()
    runner.has_ended.set()
    ended: set[int] = set()
    while ended != {1, 2}:
        report = reports.get(timeout=TIMEOUT_S)
        ended |= {output.sequence.seq_id for output in report.outputs if output.finish_reason is not None}
    engine.stop(TIMEOUT_S)


def test_many_calls_that_come_together_are_made_before_it_is_looked_whom_to_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """For each call anew it took thousands of them from thousands of clients half a minute, without any step."""
    monkeypatch.setattr(engine_module, "_CALLS_S", TIMEOUT_S)
    runner, attention, reports = SlowRunner(), RecordingAttention(), queue.Queue()
    engine = started_engine(runner, attention, reports, TIMEOUT_S)
    engine.submit(new_sequence(1, "r1", [5, 6, 7], SamplingParams(), max_tokens=4))
    runner.launched.get(timeout=TIMEOUT_S)
    choose, num_chosen, have_come = engine._scheduler.next_to_open, [0], threading.Event()

    def next_to_open() -> list[Sequence]:
        num_chosen[0] += 1
        return choose()

    engine._thread.post(have_come.wait)  # so that the others come together
    engine._thread.post(lambda: setattr(engine._scheduler, "next_to_open", next_to_open))
    for seq_id in range(2, 52):
        engine.submit(new_sequence(seq_id, "", [5, 6, 7], SamplingParams(), max_tokens=4))
    for seq_id in range(3, 52):
        engine.cancel(seq_id)
    have_come.set()
    while attention.opened.get(timeout=TIMEOUT_S) != 2:
        pass
    assert num_chosen[0] <= 3
    runner.has_ended.set()
    ended: set[int] = set()
    while ended != {1, 2}:
        report = reports.get(timeout=TIMEOUT_S)
        ended |= {output.sequence.seq_id for output in report.outputs if output.finish_reason is not None}
    engine.stop(TIMEOUT_S)


def test_a_first_step_is_reported_before_it_ends_on_a_gpu_and_only_once() -> None:
    runner, reports, observer = SlowRunner(), queue.Queue[StepReport](), Mock()
    engine = started_engine(runner, RecordingAttention(), reports, TIMEOUT_S, observers=[observer])
    engine.submit(new_sequence(1, "r1", [5, 6, 7], SamplingParams(), max_tokens=3))
    while not (report := reports.get(timeout=TIMEOUT_S)).started:
        assert not report.outputs
    [sequence] = report.started
    assert sequence.seq_id == 1 and sequence.started_s is not None and not report.outputs
    assert not runner.has_ended.is_set()
    runner.has_ended.set()
    num_tokens = 0
    while num_tokens < 3:
        report = reports.get(timeout=TIMEOUT_S)
        num_tokens += sum(len(each.token_ids) for each in report.outputs)
        assert not report.started
    engine.stop(TIMEOUT_S)
    assert [call.args[1] for call in observer.on_step.call_args_list if call.args[1]] == [[sequence]]


def test_an_opening_without_an_answer_counts_as_work_without_progress() -> None:
    attention = SilentAttention()
    engine = started_engine(FakeRunner(), attention, queue.Queue(), TIMEOUT_S)
    assert engine.progress(num_layers=2) is None
    engine.submit(new_sequence(1, "r1", [5, 6, 7], SamplingParams(), max_tokens=4))
    assert attention.opened.get(timeout=TIMEOUT_S) == 1
    progress = engine.progress(num_layers=2)
    assert progress is not None and progress.waits_for == "attn_worker"
    assert engine.progress(num_layers=2) == progress
    engine.stop(TIMEOUT_S)


def test_garbage_is_collected_when_nobody_waits() -> None:
    runner, attention = SlowRunner(), FakeAttention(bad_step=0)
    engine = started_engine(runner, attention, queue.Queue(), TIMEOUT_S)
    attention.ready_for.get(timeout=TIMEOUT_S)
    engine.submit(new_sequence(1, "r1", [5, 6, 7], SamplingParams(), max_tokens=1))
    runner.launched.get(timeout=TIMEOUT_S)
    gc.disable()
    try:
        garbage, kept = make_cycle(), [[] for _ in range(1000)]
        time.sleep(2 * IDLE_POLL_S)
        assert garbage() is not None and len(kept) == 1000, "a sequence runs"
        runner.has_ended.set()
        wait_until(lambda: garbage() is None)
    finally:
        gc.enable()
        engine.stop(TIMEOUT_S)
