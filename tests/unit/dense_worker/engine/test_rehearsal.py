"""An idle worker rehearses the steps of a sequence that is about to come, which leaves no trace in what serves."""

from __future__ import annotations

import queue
import time
from collections.abc import Iterator
from dataclasses import replace
from unittest.mock import Mock

import pytest

from services.common.sampling_params import SamplingParams
from services.dense_worker.engine import rehearsal as rehearsal_module
from services.dense_worker.engine.attachment import Attachment
from services.dense_worker.engine.engine import Engine
from services.dense_worker.engine.limits import SchedulerLimits
from services.dense_worker.engine.rehearsal import Rehearsal
from services.dense_worker.engine.scheduler import Scheduler
from services.dense_worker.engine.sequence import Sequence
from services.dense_worker.engine.step_report import StepReport
from services.pb import step_pb2
from services.step import StepPlan
from services.step.codec import encode_plan
from tests.support.dense.sequences import new_sequence
from tests.support.scripted_attention import TIMEOUT_S, RecordingAttention, SlowRunner, make_attachment

LIMITS = SchedulerLimits(4, 512, 1000, 100, "guaranteed_no_evict")


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> queue.Queue[StepPlan]:
    """The plans that are rehearsed."""
    found = queue.Queue[StepPlan]()

    def encode(plan: StepPlan) -> step_pb2.StepPlan:
        found.put(plan)
        return encode_plan(plan)

    monkeypatch.setattr(rehearsal_module, "encode_plan", encode)
    return found


def attachment(num_blocks: int = 400) -> Attachment:
    return replace(make_attachment(RecordingAttention(), 1, num_blocks), link=Mock(), rehearses=True)


def plain(num_tokens: int) -> Sequence:
    return new_sequence(7, "r", list(range(num_tokens)), SamplingParams(temperature=0.0), max_tokens=9)


def test_it_plans_the_beginning_of_the_last_prompt_alone(plans: queue.Queue[StepPlan]) -> None:
    rehearsal = Rehearsal(LIMITS, attachment())
    for num_tokens, num_rehearsed in ((5, 5), (300, 256), (30, 30)):
        rehearsal.note(plain(num_tokens))
        rehearsal.prepare()
        rehearsal.run()
        plan = plans.get_nowait()
        [new] = plan.new_sequences
        assert list(new.token_ids) == list(range(num_rehearsed))
        assert [tuple(entry) for entry in plan.entries] == [(new.seq_id, 0, num_rehearsed, 1, ())]


def test_nothing_is_rehearsed_before_a_plain_sequence_has_come_nor_twice_without_a_pause(
    plans: queue.Queue[StepPlan],
) -> None:
    rehearsal = Rehearsal(LIMITS, attachment())
    rehearsal.prepare()
    rehearsal.run()
    rehearsal.note(new_sequence(8, "r", [1, 2], SamplingParams(), max_tokens=2, num_logprobs=1))
    rehearsal.prepare()
    rehearsal.run()
    assert plans.empty()
    rehearsal.note(plain(5))
    rehearsal.prepare()
    for _ in range(2):
        rehearsal.run()
    assert plans.qsize() == 1


def test_a_prompt_without_room_is_not_planned(plans: queue.Queue[StepPlan]) -> None:
    rehearsal = Rehearsal(LIMITS, attachment(num_blocks=2))
    for num_tokens in (4, 5, 3):
        rehearsal.note(plain(num_tokens))
        rehearsal.prepare()
        rehearsal.run()
    assert plans.empty()


class Attention(RecordingAttention):
    def __init__(self) -> None:
        super().__init__()
        self.announced = queue.Queue[StepPlan]()

    def publish(self, attachment: Attachment, plan: StepPlan) -> None:
        if not plan.is_step and not plan.new_sequences:
            self.announced.put(plan)
        super().publish(attachment, plan)


@pytest.fixture
def served() -> Iterator[tuple[Engine, SlowRunner, Attention, queue.Queue[StepReport]]]:
    runner, attention, reports = SlowRunner(), Attention(), queue.Queue[StepReport]()
    engine = Engine(Scheduler(LIMITS), runner, attention, reports.put, result_timeout_s=TIMEOUT_S)  # type: ignore[arg-type]
    attention.engine = engine
    engine.start()
    engine.on_attached(replace(make_attachment(attention, 1), link=Mock(), rehearses=True))
    yield engine, runner, attention, reports
    runner.has_ended.set()
    engine.stop(TIMEOUT_S)


def until_idle(engine: Engine) -> None:
    """Waits until what was posted has been done, and the moment after it."""
    for _ in range(2):
        engine.forget_prefixes(0).result(TIMEOUT_S)


def finish(engine: Engine, runner: SlowRunner, reports: queue.Queue[StepReport]) -> None:
    """Runs sequence 1 to its end."""
    runner.has_ended.set()
    engine.submit(new_sequence(1, "r1", [5, 6, 7], SamplingParams(), max_tokens=2))
    while not any(each.finish_reason for each in reports.get(timeout=TIMEOUT_S).outputs):
        pass
    until_idle(engine)


def test_an_idle_engine_rehearses_and_announces_it_and_then_serves_as_before(
    served: tuple[Engine, SlowRunner, Attention, queue.Queue[StepReport]], plans: queue.Queue[StepPlan]
) -> None:
    engine, runner, attention, reports = served
    finish(engine, runner, reports)
    engine._rehearsed_s = float("-inf")
    engine.expect()
    assert [each.num_tokens for each in plans.get(timeout=TIMEOUT_S).entries] == [3]
    assert attention.announced.get(timeout=TIMEOUT_S)
    engine._rehearsed_s = time.monotonic() + TIMEOUT_S  # within the pause
    engine.expect()
    until_idle(engine)
    assert plans.empty() and attention.announced.empty()
    assert engine.counts.num_running == engine.counts.num_waiting == 0
    finish(engine, runner, reports)


def test_an_engine_with_a_sequence_does_not(
    served: tuple[Engine, SlowRunner, Attention, queue.Queue[StepReport]], plans: queue.Queue[StepPlan]
) -> None:
    engine, runner, attention, reports = served
    finish(engine, runner, reports)
    runner.has_ended.clear()
    while not runner.launched.empty():
        runner.launched.get()
    engine.submit(new_sequence(2, "r2", [5, 6, 7], SamplingParams(), max_tokens=2))
    runner.launched.get(timeout=TIMEOUT_S)
    engine._rehearsed_s = float("-inf")
    engine.expect()
    until_idle(engine)
    assert plans.empty() and attention.announced.empty()


def test_announcements_take_nothing_from_an_engine_with_a_sequence(
    served: tuple[Engine, SlowRunner, Attention, queue.Queue[StepReport]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gateways without sequences announce whatever arrives there, and to look whom to open takes milliseconds."""
    engine, runner, _, _ = served
    engine.submit(new_sequence(2, "r2", [5, 6, 7], SamplingParams(), max_tokens=2))
    runner.launched.get(timeout=TIMEOUT_S)
    until_idle(engine)
    choose, num_chosen = engine._scheduler.next_to_open, [0]

    def next_to_open() -> list[Sequence]:
        num_chosen[0] += 1
        return choose()

    monkeypatch.setattr(engine._scheduler, "next_to_open", next_to_open)
    engine._rehearsed_s = float("-inf")
    for _ in range(50):
        engine.expect()
        time.sleep(0.001)
    assert num_chosen == [0]
