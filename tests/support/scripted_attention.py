"""An engine with a scripted attention worker and a runner without a model. Every token that it generates is 9."""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import ClassVar

from services.channel.message_link import MessageLink
from services.dense_worker.engine.attachment import AttachedCache, Attachment, AttachmentEnd
from services.dense_worker.engine.engine import Engine
from services.dense_worker.engine.limits import SchedulerLimits
from services.dense_worker.engine.observer import EngineObserver
from services.dense_worker.engine.scheduler import Scheduler
from services.dense_worker.engine.step_report import StepReport
from services.dense_worker.features.drafting.drafting import Drafting
from services.dense_worker.features.feature import Feature
from services.dense_worker.runner.model_runner import ModelRunner, RunningStep
from services.step import NewSequence, PlanAccepted, RaggedTokens, SequenceOpened, StepPlan, StepResult

TIMEOUT_S = 10.0
GOOD, BAD = 1, 2
DELAY_S = 0.05
LIMITS = SchedulerLimits(4, 16, 64, 100, "guaranteed_no_evict")


@dataclass
class FakeStep(RunningStep):
    runs_when_collected: ClassVar[bool] = False
    plan: StepPlan

    def is_done(self) -> bool:
        return True

    def collect(self) -> StepResult:
        return StepResult(RaggedTokens.from_rows([9] * entry.num_logits for entry in self.plan.entries))


@dataclass
class SlowStep(FakeStep):
    has_ended: threading.Event

    def is_done(self) -> bool:
        return self.has_ended.is_set()


class FakeRunner:
    def attach(self, channels: object, ranks: object) -> None: ...

    def capture_ahead(self) -> bool:
        return False

    def open(self, new: NewSequence, *more: object) -> None: ...

    def launch(self, plan: StepPlan, channel: object) -> FakeStep:
        return FakeStep(plan)


class SlowRunner(FakeRunner):
    """Its steps run in the background, like a GPU's, until `has_ended` is set."""

    def __init__(self) -> None:
        self.launched: queue.Queue[StepPlan] = queue.Queue()
        self.has_ended = threading.Event()

    def launch(self, plan: StepPlan, channel: object) -> SlowStep:
        self.launched.put(plan)
        return SlowStep(plan, self.has_ended)


class FakeAttention:
    """Opens every sequence at once. In step `bad_step` sequence BAD fails: the channel counts the error at once, the
    engine receives it DELAY_S later.
    """

    def __init__(self, bad_step: int) -> None:
        self.bad_step = bad_step
        self.channel = SimpleNamespace(
            num_errors=0,
            lost_caches=(),
            num_waits=None,
            is_waiting=False,
            waited_s=0.0,
            abort=lambda: None,
            close=lambda: None,
        )
        self.engine: Engine | None = None
        self.ready_for: queue.Queue[int] = queue.Queue()

    def ready(self, attachment: Attachment) -> None:
        self.ready_for.put(attachment.attachment_id)

    def publish(self, attachment: Attachment, plan: StepPlan) -> None:
        for new in plan.new_sequences:
            self.open(attachment, new)
        if plan.is_step:
            self.run(attachment, plan)

    def open(self, attachment: Attachment, new: NewSequence) -> None:
        assert self.engine is not None
        self.engine.on_answer(attachment, SequenceOpened(new.seq_id))

    def run(self, attachment: Attachment, plan: StepPlan) -> None:
        assert self.engine is not None
        if plan.step_id != self.bad_step:
            if plan.close_seq_ids:
                self.engine.on_answer(attachment, PlanAccepted(plan.step_id))
            return
        self.channel.num_errors += 1
        answer = PlanAccepted(plan.step_id, errors={BAD: "no room"})
        threading.Timer(DELAY_S, self.engine.on_answer, (attachment, answer)).start()

    def drop(self, attachment: Attachment, error: str) -> None:
        raise AssertionError(error)


class RecordingAttention(FakeAttention):
    """Also records which sequences it opens, and why it is dropped."""

    def __init__(self) -> None:
        super().__init__(bad_step=0)
        self.attachment: Attachment | None = None
        self.opened: queue.Queue[int] = queue.Queue()
        self.dropped: queue.Queue[str] = queue.Queue()

    def open(self, attachment: Attachment, new: NewSequence) -> None:
        self.attachment = attachment
        super().open(attachment, new)
        self.opened.put(new.seq_id)

    def drop(self, attachment: Attachment, end: AttachmentEnd) -> None:
        self.dropped.put(end.reason)


class SilentAttention(RecordingAttention):
    """Never answers."""

    def open(self, attachment: Attachment, new: NewSequence) -> None:
        self.opened.put(new.seq_id)


def started_engine(
    runner: FakeRunner | ModelRunner,
    attention: FakeAttention,
    reports: queue.Queue[StepReport],
    timeout_s: float,
    limits: SchedulerLimits = LIMITS,
    num_blocks: int = 100,
    features: Sequence[Feature] = (),
    drafting: Drafting | None = None,
    observers: Sequence[EngineObserver] = (),
    link: MessageLink | None = None,
) -> Engine:
    engine = Engine(Scheduler(limits, drafting, features), runner, attention, reports.put, timeout_s, observers)
    engine.failure.add_done_callback(lambda failure: reports.put(StepReport(-1)))
    attention.engine = engine
    engine.start()
    engine.on_attached(replace(make_attachment(attention, 1, num_blocks), link=link))
    return engine


def make_attachment(attention: FakeAttention, attachment_id: int, num_blocks: int = 100) -> Attachment:
    caches = (AttachedCache(0, num_blocks, num_blocks, {}),)
    return Attachment(1, attachment_id, {0: attention.channel}, 4, caches, 4 * num_blocks)
