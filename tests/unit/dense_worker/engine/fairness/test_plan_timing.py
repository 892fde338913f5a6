"""While a GPU runs a step, the next plan waits for its predicted end: it has the requests that come meanwhile."""

from __future__ import annotations

import queue
import threading
import time

import pytest

from services.common.sampling_params import SamplingParams
from services.dense_worker.engine.limits import SchedulerLimits
from services.dense_worker.engine.plan_timing import LEAD_S, PlanTiming
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
    """Its steps run one after the other in the background, each as long as `durations` says, or else STEP_S."""

    def __init__(self) -> None:
        self.plans: list[StepPlan] = []
        self.has_launched = queue.Queue[int]()
        self.durations: dict[int, float] = {}  # by step_id
        self._last_end_s = 0.0

    def launch(self, plan: StepPlan, channel: object) -> SlowStep:
        now_s, has_ended = time.monotonic(), threading.Event()
        self._last_end_s = max(self._last_end_s, now_s) + self.durations.get(plan.step_id, STEP_S)
        timer = threading.Timer(self._last_end_s - now_s, has_ended.set)
        timer.daemon = True
        timer.start()
        self.plans.append(plan)
        self.has_launched.put(plan.step_id)
        return SlowStep(plan, has_ended)


def run(come_at: int, durations: dict[int, float]) -> tuple[TimedRunner, int]:
    """Sequence 2 comes in the middle of step `come_at` of sequence 1; returns the first step that has it, too."""
    runner, reports = TimedRunner(), queue.Queue[StepReport]()
    runner.durations = durations
    engine = started_engine(runner, RecordingAttention(), reports, TIMEOUT_S, LIMITS)
    engine.submit(new_sequence(1, "r1", [5, 6, 7], SamplingParams(), max_tokens=come_at + 5))
    ended = 0
    while ended < come_at - 1:  # then the step `come_at` begins
        ended = max(ended, reports.get(timeout=TIMEOUT_S).step_id)
    time.sleep(durations.get(come_at, STEP_S) / 4)
    engine.submit(new_sequence(2, "r2", [5, 6, 7], SamplingParams(), max_tokens=2))
    finished = set[int]()
    while len(finished) < 2:
        report = reports.get(timeout=TIMEOUT_S)
        assert report.step_id >= 0, "the engine failed"
        finished |= {each.sequence.seq_id for each in report.outputs if each.finish_reason is not None}
    engine.stop(TIMEOUT_S)
    first = next(plan.step_id for plan in runner.plans if any(entry.seq_id == 2 for entry in plan.entries))
    return runner, first


def test_a_request_that_comes_early_in_a_step_is_in_the_next_one() -> None:
    _, first = run(come_at=5, durations={})
    assert first == 6


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


def test_steps_that_are_no_longer_than_a_plan_takes_are_planned_ahead() -> None:
    _, first = run(come_at=5, durations=dict.fromkeys(range(1, 5), LEAD_S / 2))
    assert first == 7, "step 6 was planned when step 5 began"


def test_the_end_of_a_step_is_noticed_long_before_it_is_expected_and_the_next_plans_leave_earlier() -> None:
    runner, attention, reports = SlowRunner(), RecordingAttention(), queue.Queue[StepReport]()
    engine = started_engine(runner, attention, reports, TIMEOUT_S, LIMITS)
    for num_tokens in (1, 3):
        engine._timing.add(num_tokens, 100 * TIMEOUT_S)
    engine.submit(new_sequence(1, "r1", [5, 6, 7], SamplingParams(), max_tokens=2))
    runner.launched.get(timeout=TIMEOUT_S)
    engine.submit(new_sequence(2, "r2", [5, 6, 7], SamplingParams(), max_tokens=2))
    assert [attention.opened.get(timeout=TIMEOUT_S) for _ in range(2)] == [1, 2]  # the second while a plan waits
    runner.has_ended.set()
    finished = set[int]()
    while len(finished) < 2:
        report = reports.get(timeout=TIMEOUT_S)
        finished |= {each.sequence.seq_id for each in report.outputs if each.finish_reason is not None}
    engine.stop(TIMEOUT_S)
    assert engine._timing.lead_s > LEAD_S


def test_plans_wait_again_some_steps_after_they_were_late() -> None:
    runner, reports, lead_s = TimedRunner(), queue.Queue[StepReport](), 6 * LEAD_S
    runner.durations = dict.fromkeys(range(1, 20), LEAD_S)  # shorter than the lead: no plan waits
    engine = started_engine(runner, RecordingAttention(), reports, TIMEOUT_S, LIMITS)
    engine._timing.lead_s = lead_s
    engine.submit(new_sequence(1, "r1", [5, 6, 7], SamplingParams(), max_tokens=10))
    while not any(each.finish_reason for each in reports.get(timeout=TIMEOUT_S).outputs):
        pass
    engine.stop(TIMEOUT_S)
    assert LEAD_S < engine._timing.lead_s < lead_s


def test_a_plan_that_was_late_makes_the_next_ones_leave_earlier() -> None:
    timing = PlanTiming()
    timing.add(64, 0.01)
    assert timing.leaves_at(64, 5.0) == pytest.approx(5.01 - LEAD_S)
    timing.note(was_late=True)
    assert timing.leaves_at(66, 5.0) == pytest.approx(5.01 - 1.5 * LEAD_S)
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
