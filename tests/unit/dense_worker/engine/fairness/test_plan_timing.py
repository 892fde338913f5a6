"""While a GPU runs a step, the next plan waits for its predicted end: it has the requests that come meanwhile."""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Iterator
from unittest.mock import Mock

import pytest

from services.common.sampling_params import SamplingParams
from services.dense_worker.engine.engine import LEAD_S, QUICK, Engine, PlanTiming
from services.dense_worker.engine.limits import SchedulerLimits
from services.dense_worker.engine.step_report import StepReport
from services.step import StepPlan
from tests.support.dense.sequences import new_sequence
from tests.support.scripted_attention import (
    TIMEOUT_S,
    FakeRunner,
    RecordingAttention,
    SlowRunner,
    SlowStep,
    started_engine,
)

STEP_S = 0.15  # of a GPU; many times LEAD_S, for a busy machine
LIMITS = SchedulerLimits(16, 64, 100, 100, "guaranteed_no_evict")


class TimedRunner(FakeRunner):
    """Its steps run one after the other in the background, STEP_S each."""

    def __init__(self) -> None:
        self.plans: list[StepPlan] = []
        self._last_end_s = 0.0

    def launch(self, plan: StepPlan, channel: object) -> SlowStep:
        now_s, has_ended = time.monotonic(), threading.Event()
        self._last_end_s = max(self._last_end_s, now_s) + STEP_S
        timer = threading.Timer(self._last_end_s - now_s, has_ended.set)
        timer.daemon = True
        timer.start()
        self.plans.append(plan)
        return SlowStep(plan, has_ended)


def test_a_request_that_comes_between_two_steps_is_opened_at_once_and_not_by_the_plan_that_waits() -> None:
    class Reports(queue.Queue[StepReport]):
        def put(self, report: StepReport) -> None:
            if report.step_id == 4:  # on the engine's thread, which makes this call before it looks at step 5
                engine.submit(new_sequence(2, "r2", [5, 6, 7], SamplingParams(), max_tokens=2))
            super().put(report)

    runner, reports = TimedRunner(), Reports()
    engine = started_engine(runner, RecordingAttention(), reports, TIMEOUT_S, LIMITS)
    engine.submit(new_sequence(1, "r1", [5, 6, 7], SamplingParams(), max_tokens=10))
    while not any(each.sequence.seq_id == 1 and each.finish_reason for each in reports.get(timeout=TIMEOUT_S).outputs):
        pass
    engine.stop(TIMEOUT_S)
    first = next(plan.step_id for plan in runner.plans if any(entry.seq_id == 2 for entry in plan.entries))
    assert first == 6


@pytest.fixture
def slow() -> Iterator[tuple[Engine, SlowRunner, RecordingAttention, queue.Queue[StepReport]]]:
    """An engine whose steps end when the runner's event says so."""
    runner, attention, reports = SlowRunner(), RecordingAttention(), queue.Queue[StepReport]()
    engine = started_engine(runner, attention, reports, TIMEOUT_S, LIMITS)
    yield engine, runner, attention, reports
    runner.has_ended.set()
    engine.stop(TIMEOUT_S)


def begin_step(engine: Engine, runner: SlowRunner, expected_s: float) -> StepPlan:
    """Starts sequence 1, whose steps are expected to take so long, and returns the plan of the first one."""
    for num_tokens in (1, 3):
        engine._timing.add(num_tokens, expected_s)
    engine.submit(new_sequence(1, "r1", [5, 6, 7], SamplingParams(), max_tokens=2))
    return runner.launched.get(timeout=TIMEOUT_S)


def seq_ids_of(plan: StepPlan) -> set[int]:
    return {entry.seq_id for entry in plan.entries}


def test_steps_that_are_no_longer_than_a_plan_takes_are_planned_ahead(
    slow: tuple[Engine, SlowRunner, RecordingAttention, queue.Queue[StepReport]],
) -> None:
    engine, runner, _, _ = slow
    begin_step(engine, runner, LEAD_S / 2)
    assert seq_ids_of(runner.launched.get(timeout=TIMEOUT_S)) == {1}, "the first step has not ended"


def test_a_request_that_comes_in_a_step_is_in_the_next_one_and_an_early_end_is_noticed(
    slow: tuple[Engine, SlowRunner, RecordingAttention, queue.Queue[StepReport]],
) -> None:
    """The step ends long before it is expected to: the next plans leave earlier."""
    engine, runner, attention, reports = slow
    assert seq_ids_of(begin_step(engine, runner, 100 * TIMEOUT_S)) == {1}
    engine.submit(new_sequence(2, "r2", [5, 6, 7], SamplingParams(), max_tokens=2))
    assert [attention.opened.get(timeout=TIMEOUT_S) for _ in range(2)] == [1, 2]  # the second while a plan waits
    assert runner.launched.empty()
    runner.has_ended.set()
    assert seq_ids_of(runner.launched.get(timeout=TIMEOUT_S)) == {1, 2}
    finished = set[int]()
    while len(finished) < 2:
        report = reports.get(timeout=TIMEOUT_S)
        finished |= {each.sequence.seq_id for each in report.outputs if each.finish_reason is not None}
    engine.stop(TIMEOUT_S)
    assert engine._timing.lead_s > LEAD_S


def test_plans_wait_again_some_steps_after_they_were_late(
    slow: tuple[Engine, SlowRunner, RecordingAttention, queue.Queue[StepReport]],
) -> None:
    engine, runner, _, reports = slow
    engine._timing.lead_s = lead_s = 6 * LEAD_S
    engine._timing.leaves_at = lambda num_tokens, begin_s, is_quick: begin_s  # type: ignore[method-assign]  no plan waits
    runner.has_ended.set()
    engine.submit(new_sequence(1, "r1", [5, 6, 7], SamplingParams(), max_tokens=10))
    while not any(each.finish_reason for each in reports.get(timeout=TIMEOUT_S).outputs):
        pass
    engine.stop(TIMEOUT_S)
    assert LEAD_S < engine._timing.lead_s < lead_s


class SteppedRunner(FakeRunner):
    """Each of its steps ends when its own event is set."""

    def __init__(self) -> None:
        self.launched: queue.Queue[tuple[StepPlan, threading.Event]] = queue.Queue()

    def launch(self, plan: StepPlan, channel: object) -> SlowStep:
        self.launched.put((plan, threading.Event()))
        return SlowStep(plan, self.launched.queue[-1][1])


@pytest.mark.parametrize("has_link", [False, True])
def test_a_plan_of_few_streams_alone_may_leave_later_until_somebody_comes(has_link: bool) -> None:
    """Here it waits for ever then, and leaves at once otherwise."""
    runner, attention, reports = SteppedRunner(), RecordingAttention(), queue.Queue[StepReport]()
    engine = started_engine(runner, attention, reports, TIMEOUT_S, LIMITS, link=Mock() if has_link else None)
    engine._timing.leaves_at = (  # type: ignore[method-assign]
        lambda num_tokens, begin_s, is_quick=False: math.inf if is_quick else begin_s
    )
    engine.submit(new_sequence(1, "r1", [5, 6, 7], SamplingParams(), max_tokens=4))
    ends = []
    for _ in range(2):  # the prompt, and the step behind it, whose sequence is no stream yet
        plan, end = runner.launched.get(timeout=TIMEOUT_S)
        assert seq_ids_of(plan) == {1}
        ends.append(end)
    ends[0].set()
    while not reports.get(timeout=TIMEOUT_S).outputs:
        pass
    if has_link:
        engine.submit(new_sequence(2, "r2", [5, 6, 7], SamplingParams(), max_tokens=2))
    plan, end = runner.launched.get(timeout=TIMEOUT_S)
    assert seq_ids_of(plan) == ({1, 2} if has_link else {1})
    ends[1].set()
    end.set()
    engine.stop(TIMEOUT_S)


def test_a_plan_that_was_late_makes_the_next_ones_leave_earlier() -> None:
    timing = PlanTiming()
    timing.add(64, 0.01)
    assert timing.leaves_at(64, 5.0) == pytest.approx(5.01 - LEAD_S)
    assert timing.leaves_at(64, 5.0, is_quick=True) == pytest.approx(5.01 - QUICK * LEAD_S)
    timing.note(was_late=True)
    assert timing.leaves_at(66, 5.0) == pytest.approx(5.01 - 1.5 * LEAD_S)
    assert timing.leaves_at(66, 5.0, is_quick=True) == pytest.approx(5.01 - 1.5 * QUICK * LEAD_S)
    for _ in range(100):
        timing.note(was_late=False)
    assert timing.leaves_at(64, 5.0) == pytest.approx(5.01 - LEAD_S)


def test_a_step_is_expected_to_take_as_long_as_the_fastest_of_the_last_three_like_it() -> None:
    timing = PlanTiming()
    assert timing.leaves_at(128, 5.0) == 5.0, "nothing is known"
    for duration_s in (0.01, 0.05, 0.04, 0.06):
        timing.add(128, duration_s)
    assert timing.leaves_at(128, 5.0) == pytest.approx(5.04 - LEAD_S)
    assert timing.leaves_at(256, 5.0) == 5.0
