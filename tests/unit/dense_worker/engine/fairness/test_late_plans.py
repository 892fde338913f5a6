"""The engine publishes plans late when steps are long, so that a new client gets the next step, not the one after."""

from __future__ import annotations

import queue
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from services.common.errors import PeerError
from services.common.sampling_params import SamplingParams
from services.dense_worker.engine import engine as engine_module
from services.dense_worker.engine.attachment import Attachment, AttachmentEnd
from services.dense_worker.engine.fairness.step_shares import MIN_STREAMS
from services.dense_worker.engine.limits import SchedulerLimits
from services.dense_worker.engine.sequence import FinishReason, Sequence
from services.dense_worker.engine.session import ScheduledStep, Session
from services.dense_worker.engine.step_report import StepReport
from services.step import NewSequence, SequenceOpened, StepPlan, StepResult
from tests.support.dense.sequences import ask, new_sequence
from tests.support.scripted_attention import TIMEOUT_S, FakeRunner, FakeStep, RecordingAttention, started_engine

LIMITS = SchedulerLimits(16, 64, 100, 100, "guaranteed_no_evict")
NUM_TOKENS, NEW_TOKENS = 40, 3  # of the streams, and of the new client's
COME_AT = 20  # the number of the step in which it comes
NEW = 100  # its seq_id


class CpuStep(FakeStep):
    """A step that runs when it is collected, like a CPU's. Tells when it begins and ends, and how far it is."""

    runs_when_collected = True

    def __init__(self, plan: StepPlan, on_event: Callable[[int, str], None]) -> None:
        super().__init__(plan)
        self.on_event = on_event

    has_begun = False

    def begin(self) -> None:
        if not self.has_begun:
            self.has_begun = True
            self.on_event(self.plan.step_id, "begin")

    def run_first(self) -> None:
        self.begin()
        self.on_event(self.plan.step_id, "first layer")

    def run_most(self) -> None:
        self.begin()
        self.on_event(self.plan.step_id, "three quarters")

    def collect(self) -> StepResult:
        self.begin()
        self.on_event(self.plan.step_id, "near the end")
        result = super().collect()
        self.on_event(self.plan.step_id, "end")
        return result


class CpuRunner(FakeRunner):
    """Makes the calls of `calls` on the engine thread, by step and event."""

    def __init__(self) -> None:
        self.calls: dict[tuple[int, str], Callable[[], None]] = {}
        self.plans: list[StepPlan] = []
        self.launched_in: dict[int, tuple[int, str]] = {}  # the step and event in which a step was launched, by step
        self.now = 0, "idle"

    def launch(self, plan: StepPlan, channel: object) -> CpuStep:
        self.plans.append(plan)
        self.launched_in[plan.step_id] = self.now
        return CpuStep(plan, self.on_event)

    def on_event(self, step_id: int, event: str) -> None:
        self.now = (0, "idle") if event == "end" else (step_id, event)
        self.calls.get((step_id, event), lambda: None)()


class BusyAttention(RecordingAttention):
    """Opens a new client's sequence only when the running step has ended, as a CPU's attention worker does."""

    def __init__(self, runner: CpuRunner) -> None:
        super().__init__()
        self.runner = runner

    def open(self, attachment: Attachment, new: NewSequence) -> None:
        step_id, event = self.runner.now
        if event == "idle":
            super().open(attachment, new)
            return
        assert self.engine is not None
        answer = SequenceOpened(new.seq_id)
        self.runner.calls[step_id, "end"] = lambda: self.engine.on_answer(attachment, answer)


class ReportsWithTime(queue.Queue[StepReport]):
    """Notes in which step and event of the runner a step's report was delivered."""

    runner: CpuRunner

    def __init__(self) -> None:
        super().__init__()
        self.now: dict[int, tuple[int, str]] = {}  # by step

    def put(self, report: StepReport, *arguments: object, **options: object) -> None:
        if report.outputs:
            self.now[report.step_id] = self.runner.now
        super().put(report)


def make_sequence(seq_id: int, client: int, max_tokens: int) -> Sequence:
    sequence = new_sequence(seq_id, f"r{seq_id}", [5, 6, 7], SamplingParams(), max_tokens=max_tokens)
    ask(sequence, client=client)
    return sequence


def run(event: str, monkeypatch: pytest.MonkeyPatch, *, long_step_s: float) -> CpuRunner:
    """One client's streams; another client comes at this event of step COME_AT. All get all of their tokens."""
    monkeypatch.setattr(engine_module, "_LONG_STEP_S", long_step_s)
    runner, reports = CpuRunner(), queue.Queue[StepReport]()
    attention = BusyAttention(runner)
    engine = started_engine(runner, attention, reports, TIMEOUT_S, LIMITS, num_blocks=400)
    runner.calls[COME_AT, event] = lambda: engine.submit(make_sequence(NEW, 2, NEW_TOKENS))
    engine.drain(True)  # until all are there, so that they begin together
    for seq_id in range(1, MIN_STREAMS + 1):
        engine.submit(make_sequence(seq_id, 1, NUM_TOKENS))
    engine.drain(False)
    num_tokens, ends = defaultdict[int, int](int), dict[int, FinishReason | None]()
    while len(ends) < MIN_STREAMS + 1:
        report = reports.get(timeout=TIMEOUT_S)
        assert report.step_id >= 0, "the engine failed"
        for output in report.outputs:
            num_tokens[output.sequence.seq_id] += len(output.token_ids)
            if output.finish_reason is not None:
                ends[output.sequence.seq_id] = output.finish_reason
    engine.stop(TIMEOUT_S)
    assert num_tokens == {**dict.fromkeys(range(1, MIN_STREAMS + 1), NUM_TOKENS), NEW: NEW_TOKENS}
    assert set(ends.values()) == {FinishReason.LENGTH}
    return runner


def first_step_of_new_client(runner: CpuRunner) -> int:
    return next(plan.step_id for plan in runner.plans if any(entry.seq_id == NEW for entry in plan.entries))


def test_a_client_that_comes_early_in_a_long_step_gets_the_next_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runner = run("begin", monkeypatch, long_step_s=0.0)
    assert first_step_of_new_client(runner) == COME_AT + 1
    [plan] = [each for each in runner.plans if each.step_id == COME_AT + 1]
    assert [entry.seq_id for entry in plan.entries] == [NEW], "a step of its own"


def test_a_client_that_comes_near_its_end_waits_for_the_step_that_is_published(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runner = run("near the end", monkeypatch, long_step_s=0.0)
    assert first_step_of_new_client(runner) == COME_AT + 2


def test_short_steps_are_published_in_the_first_layers_of_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the attention worker never waits for a plan; a client that comes later waits for two of them."""
    runner = run("near the end", monkeypatch, long_step_s=TIMEOUT_S)
    assert first_step_of_new_client(runner) == COME_AT + 2
    ahead = {step_id: at for step_id, at in runner.launched_in.items() if at != (0, "idle")}
    assert len(ahead) >= NUM_TOKENS - 2
    assert all(at == (step_id - 1, "first layer") for step_id, at in ahead.items())


@pytest.mark.parametrize("long_step_s", [0.0, TIMEOUT_S])
def test_only_a_short_step_begins_before_the_report_of_the_one_before_it(
    long_step_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attention then computes its first layer during the report, which no long or larger step delays."""
    monkeypatch.setattr(engine_module, "_LONG_STEP_S", long_step_s)
    runner, reports = CpuRunner(), ReportsWithTime()
    reports.runner = runner
    attention = RecordingAttention()
    engine = started_engine(runner, attention, reports, TIMEOUT_S, LIMITS)
    runner.calls[3, "begin"] = lambda: engine.submit(make_sequence(2, 1, 2))  # its prompt has three tokens
    engine.submit(make_sequence(1, 1, NUM_TOKENS))
    while all(output.finish_reason is None for output in reports.get(timeout=TIMEOUT_S).outputs):
        pass
    while all(output.finish_reason is None for output in reports.get(timeout=TIMEOUT_S).outputs):
        pass
    engine.stop(TIMEOUT_S)
    num_tokens = {plan.step_id: plan.num_tokens for plan in runner.plans}
    began = {step_id for step_id, now in reports.now.items() if now == (step_id + 1, "begin")}
    if not long_step_s:
        assert not began
        return
    larger = {step_id for step_id in num_tokens if num_tokens.get(step_id + 1, 0) > num_tokens[step_id]}
    assert larger and not began & larger
    assert len(began) >= NUM_TOKENS - 6


def test_a_step_with_extra_rows_begins_after_the_report_of_the_one_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """It hands them over, and waits for the attention worker, before its layers."""
    monkeypatch.setattr(engine_module, "_LONG_STEP_S", TIMEOUT_S)
    runner, reports = CpuRunner(), ReportsWithTime()
    reports.runner = runner
    engine = started_engine(runner, RecordingAttention(), reports, TIMEOUT_S, LIMITS)
    session_schedule = Session.schedule

    def schedule(session: Session, *arguments: Any) -> ScheduledStep | None:
        step = session_schedule(session, *arguments)
        if step is not None and step.plan.step_id == 5:
            step.plan = replace(step.plan, extra_rows=((1, 8),))
        return step

    monkeypatch.setattr(Session, "schedule", schedule)
    engine.submit(make_sequence(1, 1, NUM_TOKENS))
    while all(output.finish_reason is None for output in reports.get(timeout=TIMEOUT_S).outputs):
        pass
    engine.stop(TIMEOUT_S)
    assert reports.now[3] == (4, "begin") and reports.now[5] == (6, "begin")
    assert reports.now[4] == (0, "idle")


def test_tokens_of_a_step_are_delivered_though_the_next_one_cannot_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of ranks, of which another one has gone."""
    monkeypatch.setattr(engine_module, "_LONG_STEP_S", TIMEOUT_S)
    runner, reports = CpuRunner(), queue.Queue[StepReport]()
    attention = RecordingAttention()
    engine = started_engine(runner, attention, reports, TIMEOUT_S, LIMITS)

    def lose() -> None:
        raise PeerError("another rank has gone")

    runner.calls[5, "begin"] = lose
    engine.submit(make_sequence(1, 1, NUM_TOKENS))
    assert attention.dropped.get(timeout=TIMEOUT_S) == "another rank has gone"
    engine.stop(TIMEOUT_S)
    assert not engine.failure.done()
    tokens = [token_id for report in reports.queue for output in report.outputs for token_id in output.token_ids]
    assert tokens == [9] * 4


def test_each_long_step_is_published_near_the_end_of_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = run("begin", monkeypatch, long_step_s=0.0)
    late = [step_id for step_id, (_, event) in runner.launched_in.items() if event != "idle"]
    assert all(runner.launched_in[step_id] == (step_id - 1, "three quarters") for step_id in late)
    unforeseen = len(runner.plans) - len(late)  # after an idle engine, for the new client, and closing the last ones
    assert len(late) >= NUM_TOKENS - 2 and unforeseen <= 5


def test_nothing_is_published_for_an_attachment_that_ends_within_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "_LONG_STEP_S", 0.0)
    runner, reports = CpuRunner(), queue.Queue[StepReport]()
    attention = RecordingAttention()
    engine = started_engine(runner, attention, reports, TIMEOUT_S, LIMITS)

    def lose() -> None:
        assert attention.attachment is not None
        engine.on_detached(attention.attachment, AttachmentEnd("gone", is_crash=True))

    runner.calls[3, "begin"] = lose
    engine.submit(make_sequence(1, 1, NUM_TOKENS))
    assert attention.dropped.get(timeout=TIMEOUT_S) == "the attention worker went away"
    engine.stop(TIMEOUT_S)
    assert not engine.failure.done()
    assert [plan.step_id for plan in runner.plans] == [1, 2, 3]
    tokens = [token_id for report in reports.queue for output in report.outputs for token_id in output.token_ids]
    assert tokens == [9, 9], "the third step is void"
