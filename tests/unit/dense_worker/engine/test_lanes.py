"""The dense worker uses the channel and the error count of a step's lane."""

from __future__ import annotations

import dataclasses
import queue
from types import SimpleNamespace
from typing import Any

import pytest

from services.common.sampling_params import SamplingParams
from services.dense_worker.engine.attachment import AttachedCache, Attachment
from services.dense_worker.engine.decode_rows import NO_DECODES
from services.dense_worker.engine.engine import Engine, progress_of
from services.dense_worker.engine.observer import EngineCounts
from services.dense_worker.engine.scheduler import Scheduler
from services.dense_worker.engine.sequence import FinishReason
from services.dense_worker.engine.session import NO_ATTACHMENT, ScheduledStep
from services.dense_worker.engine.step_report import StepReport
from services.rpc.watchdog import Progress
from services.step import PlanEntry, StepPlan
from tests.support.dense.sequences import new_sequence
from tests.support.plans import plan_of
from tests.support.scripted_attention import BAD, GOOD, LIMITS, TIMEOUT_S, FakeAttention, FakeRunner, FakeStep

NUM_LAYERS = 4
NUM_BLOCKS = 100


class TwoLaneAttention(FakeAttention):
    """BAD fails in its step number `bad_step`. Counts the error in the channel of the step's lane."""

    def __init__(self, bad_step: int) -> None:
        super().__init__(0)
        self._num_left = bad_step or -1
        self.channels = {
            lane: SimpleNamespace(
                num_errors=0,
                lost_caches=(),
                num_waits=None,
                is_waiting=False,
                waited_s=0.0,
                abort=lambda: None,
                close=lambda: None,
            )
            for lane in (0, 1)
        }

    def run(self, attachment: Attachment, plan: StepPlan) -> None:
        self.channel = self.channels[plan.lane]
        self._num_left -= BAD in plan.entries.seq_ids.tolist()
        if self._num_left == 0 and not self.bad_step:
            self.bad_step = plan.step_id
        super().run(attachment, plan)


class RecordingRunner(FakeRunner):
    """Records the channels that it is attached to, and the lane and channel of each step."""

    def __init__(self) -> None:
        self.attached: list[object] = []
        self.launched: list[tuple[int, object]] = []
        self.opened: list[tuple[int, int]] = []

    def attach(self, channels: Any, ranks: Any) -> None:
        self.attached = list(channels)

    def open(self, new: Any, *more: object) -> None:
        self.opened.append((new.seq_id, new.lane))

    def launch(self, plan: StepPlan, channel: object) -> FakeStep:
        self.launched.append((plan.lane, channel))
        return super().launch(plan, channel)


def start_engine(attention: TwoLaneAttention, runner: FakeRunner) -> tuple[Engine, queue.Queue[StepReport]]:
    """An engine that is attached to two lanes, and the queue of its reports."""
    reports: queue.Queue[StepReport] = queue.Queue()
    engine = Engine(Scheduler(LIMITS), runner, attention, reports.put, result_timeout_s=TIMEOUT_S)
    engine.failure.add_done_callback(lambda failure: reports.put(StepReport(-1)))
    attention.engine = engine
    engine.start()
    caches = (AttachedCache(0, NUM_BLOCKS, NUM_BLOCKS, {}),)
    engine.on_attached(Attachment(1, 1, attention.channels, 4, caches, 4 * NUM_BLOCKS))
    return engine, reports


def run_to_end(engine: Engine, reports: queue.Queue[StepReport], seq_ids: tuple[int, ...]) -> dict[int, FinishReason]:
    """Runs sequences of six tokens. Returns why they ended."""
    for seq_id in seq_ids:
        engine.submit(new_sequence(seq_id, f"r{seq_id}", [5, 6, 7], SamplingParams(), max_tokens=6))
    ends: dict[int, FinishReason] = {}
    while len(ends) < len(seq_ids):
        report = reports.get(timeout=TIMEOUT_S)
        assert report.step_id >= 0, "the engine failed"
        for output in report.outputs:
            if output.finish_reason is not None:
                ends[output.sequence.seq_id] = output.finish_reason
    engine.stop(TIMEOUT_S)
    return ends


def test_a_step_runs_on_the_channel_of_its_lane() -> None:
    attention, runner = TwoLaneAttention(bad_step=0), RecordingRunner()
    engine, reports = start_engine(attention, runner)
    assert run_to_end(engine, reports, (GOOD, BAD)) == dict.fromkeys((GOOD, BAD), FinishReason.LENGTH)
    channels = attention.channels
    assert runner.attached == [channels[0], channels[1]]
    assert {lane for lane, _ in runner.launched} == {0, 1}
    assert all(channel is channels[lane] for lane, channel in runner.launched)
    assert set(runner.opened) == {(GOOD, 0), (BAD, 1)}, "each sequence is in a lane of its own"


@pytest.mark.parametrize("seq_ids", [(BAD, GOOD), (GOOD, BAD)])
def test_errors_are_counted_for_the_lane_of_their_step(seq_ids: tuple[int, ...]) -> None:
    """A wrong count would end the attachment: the engine waits until its count equals the channel's."""
    attention = TwoLaneAttention(bad_step=3)
    engine, reports = start_engine(attention, FakeRunner())
    assert run_to_end(engine, reports, seq_ids) == {GOOD: FinishReason.LENGTH, BAD: FinishReason.ERROR}
    bad_lane = seq_ids.index(BAD)
    assert [attention.channels[lane].num_errors for lane in (0, 1)] == [int(lane == bad_lane) for lane in (0, 1)]


def test_progress_comes_from_the_channel_of_the_oldest_steps_lane() -> None:
    channels: dict[int, Any] = {
        0: SimpleNamespace(num_waits=9, is_waiting=False),
        1: SimpleNamespace(num_waits=14, is_waiting=True),
    }
    session = Scheduler(LIMITS).begin(dataclasses.replace(NO_ATTACHMENT, attachment_id=7, channels=channels))
    session.request_ids[5] = "named"
    counts = EngineCounts(0, 0, 1, num_steps=31, num_preemptions=0, is_attached=True)

    def progress(*lanes: int) -> Progress | None:
        plans = [plan_of(30 + lane, PlanEntry(5, 0, 1, 1), PlanEntry(0xAB, 0, 1, 1), lane=lane) for lane in lanes]
        session.in_flight = tuple(ScheduledStep(plan, NO_DECODES, ()) for plan in plans)
        return progress_of(session, counts, NUM_LAYERS)

    assert progress(1, 0) == Progress(
        (7, 31, 0, 9, 14), step_id=31, layer=2, request_ids=("named", "ab"), waits_for="attn_worker"
    )
    assert progress(0, 1) == Progress((7, 31, 0, 9, 14), step_id=30, layer=1, request_ids=("named", "ab"))
