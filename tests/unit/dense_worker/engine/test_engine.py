"""The engine thread against a scripted attention worker: whose tokens may be delivered, and when."""

from __future__ import annotations

import queue
import threading
import time
from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from services.common.sampling_params import SamplingParams
from services.dense_worker.engine.attachment import Attachment, AttachmentEnd
from services.dense_worker.engine.engine import Engine
from services.dense_worker.engine.scheduler import SchedulerLimits
from services.dense_worker.engine.sequence import FinishReason, Sequence
from services.dense_worker.engine.step_report import StepReport
from services.step import NewSequence, PlanAccepted, SequenceOpened, StepPlan, StepResult

TIMEOUT_S = 10.0
GOOD, BAD = 1, 2
DELAY_S = 0.05
LIMITS = SchedulerLimits(4, 16, 64, 100, "guaranteed_no_evict")


@dataclass
class FakeStep:
    plan: StepPlan

    def is_done(self) -> bool:
        return True

    def collect(self) -> StepResult:
        return StepResult([[9] * entry.num_logits for entry in self.plan.entries])


@dataclass
class SlowStep(FakeStep):
    has_ended: threading.Event

    def is_done(self) -> bool:
        return self.has_ended.is_set()


class FakeRunner:
    def attach(self, channels: object) -> None: ...

    def open(self, new: NewSequence) -> None: ...

    def launch(self, plan: StepPlan, channel: object) -> FakeStep:
        return FakeStep(plan)


class FakeAttention:
    """Opens at once; step `bad_step` cannot run sequence BAD, which is counted at once and told late."""

    def __init__(self, bad_step: int) -> None:
        self.bad_step = bad_step
        self.channel = SimpleNamespace(
            num_errors=0, num_waits=None, is_waiting=False, waited_s=0.0, abort=lambda: None, close=lambda: None
        )
        self.engine: Engine | None = None
        self.ready_for: queue.Queue[int] = queue.Queue()

    def ready(self, attachment: Attachment) -> None:
        self.ready_for.put(attachment.attachment_id)

    def publish(self, attachment: Attachment, plan: StepPlan) -> None:
        for new in plan.new_sequences:
            self.open(attachment, new)
        if plan.step_id:
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


@pytest.mark.parametrize("bad_step", [1, 2, 3])
def test_a_row_without_meaning_is_never_delivered_however_late_the_result_comes(bad_step: int) -> None:
    reports: queue.Queue[StepReport] = queue.Queue()
    attention = FakeAttention(bad_step)
    engine = started_engine(FakeRunner(), attention, reports, TIMEOUT_S)
    for seq_id in (GOOD, BAD):
        engine.submit(Sequence(seq_id, f"r{seq_id}", [5, 6, 7], SamplingParams(), max_tokens=6))
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


class SlowRunner(FakeRunner):
    """Steps like a GPU's: launched, and under way until `has_ended` is set."""

    def __init__(self) -> None:
        self.launched: queue.Queue[StepPlan] = queue.Queue()
        self.has_ended = threading.Event()

    def launch(self, plan: StepPlan, channel: object) -> SlowStep:
        self.launched.put(plan)
        return SlowStep(plan, self.has_ended)


class NotingAttention(FakeAttention):
    """Also tells when which sequence was to be opened."""

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


class SmallAttention(FakeAttention):
    """Has four blocks, and a prefix of one for who is opened again; opens `second` between two steps of the first."""

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


def test_a_sequence_that_was_preempted_before_its_first_step_is_told_of_when_it_starts() -> None:
    attention = SmallAttention(Sequence(2, "r2", [5] * 12, SamplingParams(), max_tokens=2))
    reports: queue.Queue[StepReport] = queue.Queue()
    limits = SchedulerLimits(4, 4, 64, 100, "max_utilization")
    engine = started_engine(FakeRunner(), attention, reports, TIMEOUT_S, limits, num_blocks=4)
    engine.submit(Sequence(1, "r1", [5] * 4, SamplingParams(), max_tokens=2))
    started, ended = [], []
    while len(ended) < 2:
        report = reports.get(timeout=TIMEOUT_S)
        assert report.step_id >= 0, "the engine failed"
        started += [sequence.seq_id for sequence in report.started]
        ended += [output.sequence.seq_id for output in report.outputs if output.finish_reason is not None]
    engine.stop(TIMEOUT_S)
    assert attention.num_opens == {1: 1, 2: 2}
    assert started == ended == [1, 2]


class MuteAttention(NotingAttention):
    """Never answers."""

    def open(self, attachment: Attachment, new: NewSequence) -> None:
        self.opened.put(new.seq_id)


def started_engine(
    runner: FakeRunner,
    attention: FakeAttention,
    reports: queue.Queue[StepReport],
    timeout_s: float,
    limits: SchedulerLimits = LIMITS,
    num_blocks: int = 100,
) -> Engine:
    engine = Engine(
        limits,
        runner,
        attention,
        reports.put,
        result_timeout_s=timeout_s,
    )
    engine.failure.add_done_callback(lambda failure: reports.put(StepReport(-1)))
    attention.engine = engine
    engine.start()
    engine.on_attached(make_attachment(attention, 1, num_blocks))
    return engine


def make_attachment(attention: FakeAttention, attachment_id: int, num_blocks: int = 100) -> Attachment:
    return Attachment(1, attachment_id, {0: attention.channel}, 4, num_blocks, num_blocks, {})


def test_an_engine_is_ready_when_its_runner_has_attached() -> None:
    may_attach = threading.Event()

    class CapturingRunner(FakeRunner):
        def attach(self, channels: object) -> None:
            assert may_attach.wait(TIMEOUT_S)

    attention = FakeAttention(bad_step=0)
    engine = started_engine(CapturingRunner(), attention, queue.Queue(), TIMEOUT_S)
    time.sleep(DELAY_S)
    assert attention.ready_for.empty()
    may_attach.set()
    assert attention.ready_for.get(timeout=TIMEOUT_S) == 1
    engine.stop(TIMEOUT_S)


def test_a_sequence_that_comes_while_a_step_runs_is_opened_before_that_step_ends() -> None:
    runner, attention, reports = SlowRunner(), NotingAttention(), queue.Queue()
    engine = started_engine(runner, attention, reports, TIMEOUT_S)
    engine.submit(Sequence(1, "r1", [5, 6, 7], SamplingParams(), max_tokens=4))
    runner.launched.get(timeout=TIMEOUT_S)
    assert attention.opened.get(timeout=TIMEOUT_S) == 1
    engine.submit(Sequence(2, "r2", [5, 6, 7], SamplingParams(), max_tokens=4))
    assert attention.opened.get(timeout=TIMEOUT_S) == 2
    assert not runner.has_ended.is_set()
    runner.has_ended.set()
    ended: set[int] = set()
    while ended != {1, 2}:
        report = reports.get(timeout=TIMEOUT_S)
        ended |= {output.sequence.seq_id for output in report.outputs if output.finish_reason is not None}
    engine.stop(TIMEOUT_S)


def test_a_step_that_never_ends_gives_the_attachment_up() -> None:
    attention = NotingAttention()
    engine = started_engine(SlowRunner(), attention, queue.Queue(), timeout_s=0.05)
    engine.submit(Sequence(1, "r1", [5, 6, 7], SamplingParams(), max_tokens=4))
    assert "step 1 has not ended after 0.05 s" in attention.dropped.get(timeout=TIMEOUT_S)
    engine.stop(TIMEOUT_S)


def test_steps_that_are_published_are_delivered_before_the_engine_leaves() -> None:
    runner, attention, reports = SlowRunner(), NotingAttention(), queue.Queue()
    engine = started_engine(runner, attention, reports, TIMEOUT_S)
    engine.submit(Sequence(1, "r1", [5, 6, 7], SamplingParams(), max_tokens=20))
    for _ in range(2):
        runner.launched.get(timeout=TIMEOUT_S)
    engine.leave()
    time.sleep(DELAY_S)
    assert attention.dropped.empty(), "two steps are under way"
    runner.has_ended.set()
    assert attention.dropped.get(timeout=TIMEOUT_S) == "another dense worker takes over"
    engine.stop(TIMEOUT_S)
    assert runner.launched.empty(), "nothing new was planned"
    assert [output.token_ids for report in reports.queue for output in report.outputs] == [[9], [9]]


def test_an_attachment_that_ends_while_a_step_runs_is_followed_by_another() -> None:
    runner, attention, reports = SlowRunner(), NotingAttention(), queue.Queue()
    engine = started_engine(runner, attention, reports, TIMEOUT_S)
    engine.submit(Sequence(1, "r1", [5, 6, 7], SamplingParams(), max_tokens=3))
    for _ in range(2):
        runner.launched.get(timeout=TIMEOUT_S)
    assert attention.attachment is not None
    engine.on_detached(attention.attachment, AttachmentEnd("gone", is_crash=True))
    engine.on_attached(make_attachment(attention, 2))
    runner.has_ended.set()
    tokens: list[int] = []
    while len(tokens) < 3:
        for output in reports.get(timeout=TIMEOUT_S).outputs:
            tokens += output.token_ids
    engine.stop(TIMEOUT_S)
    assert tokens == [9, 9, 9] and reports.empty(), "lost steps are run again, and told once"
    assert list(attention.opened.queue) == [1, 1]


def test_the_region_of_an_attachment_that_ends_is_unmapped_before_there_is_another() -> None:
    """A step is under way: the channel is aborted first, so that a GPU ends it."""
    runner, attention = SlowRunner(), NotingAttention()
    deeds: queue.Queue[str] = queue.Queue()
    attention.channel.abort = lambda: (deeds.put("abort"), runner.has_ended.set())
    attention.channel.close = lambda: deeds.put("close")
    engine = started_engine(runner, attention, queue.Queue(), TIMEOUT_S)
    engine.submit(Sequence(1, "r1", [5, 6, 7], SamplingParams(), max_tokens=3))
    for _ in range(2):
        runner.launched.get(timeout=TIMEOUT_S)
    assert attention.attachment is not None
    assert engine.spans_under_way() == {1: range(4)}, "the prompt's three tokens, and the one sampled from it"
    engine.on_detached(attention.attachment, AttachmentEnd("gone", is_crash=True))
    assert [deeds.get(timeout=TIMEOUT_S) for _ in range(2)] == ["abort", "close"]
    assert engine.spans_under_way() == {1: range(4)}, "gateways are told afterwards"
    engine.stop(TIMEOUT_S)
    assert "close" not in deeds.queue, "once is enough"


def test_an_opening_without_an_answer_counts_as_work_without_progress() -> None:
    attention = MuteAttention()
    engine = started_engine(FakeRunner(), attention, queue.Queue(), TIMEOUT_S)
    assert engine.progress(num_layers=2) is None
    engine.submit(Sequence(1, "r1", [5, 6, 7], SamplingParams(), max_tokens=4))
    assert attention.opened.get(timeout=TIMEOUT_S) == 1
    progress = engine.progress(num_layers=2)
    assert progress is not None and progress.waits_for == "attn_worker"
    assert engine.progress(num_layers=2) == progress
    engine.stop(TIMEOUT_S)


def test_a_step_that_never_ends_gives_the_attachment_up_however_much_comes_meanwhile() -> None:
    class TalkingStep(FakeStep):
        """Whenever it is looked at, something new has come."""

        def is_done(self) -> bool:
            assert attention.engine is not None
            attention.engine.cancel(seq_id=99)
            return False

    class TalkingRunner(FakeRunner):
        def launch(self, plan: StepPlan, channel: object) -> TalkingStep:
            return TalkingStep(plan)

    attention = NotingAttention()
    engine = started_engine(TalkingRunner(), attention, queue.Queue(), timeout_s=0.05)
    engine.submit(Sequence(1, "r1", [5, 6, 7], SamplingParams(), max_tokens=4))
    assert "step 1 has not ended after 0.05 s" in attention.dropped.get(timeout=TIMEOUT_S)
    engine.stop(TIMEOUT_S)


def test_an_error_that_is_never_told_gives_the_attachment_up_however_much_comes_meanwhile() -> None:
    class TalkingChannel(SimpleNamespace):
        """Whenever it is asked for its errors, something new has come."""

        @property
        def num_errors(self) -> int:
            assert attention.engine is not None
            attention.engine.cancel(seq_id=99)
            return 1

    attention = NotingAttention()
    attention.channel = TalkingChannel(
        num_waits=None, is_waiting=False, waited_s=0.0, abort=lambda: None, close=lambda: None
    )
    engine = started_engine(FakeRunner(), attention, queue.Queue(), timeout_s=0.05)
    engine.submit(Sequence(1, "r1", [5, 6, 7], SamplingParams(), max_tokens=4))
    assert "errors up to step 1 are not here after 0.05 s" in attention.dropped.get(timeout=TIMEOUT_S)
    engine.stop(TIMEOUT_S)


def test_an_opening_that_is_never_answered_gives_the_attachment_up() -> None:
    attention = MuteAttention()
    engine = started_engine(FakeRunner(), attention, queue.Queue(), timeout_s=0.05)
    engine.submit(Sequence(0xAB, "r1", [5, 6, 7], SamplingParams(), max_tokens=4))
    assert attention.dropped.get(timeout=TIMEOUT_S) == "sequence ab has not been opened after 0.15 s"
    assert attention.opened.get(timeout=TIMEOUT_S) == 0xAB
    engine.on_attached(make_attachment(attention, 2))
    assert attention.opened.get(timeout=TIMEOUT_S) == 0xAB
    engine.stop(TIMEOUT_S)


@pytest.mark.parametrize("answer", [SequenceOpened(0xAB), PlanAccepted(7)])
def test_an_answer_that_nobody_waits_for_gives_the_attachment_up(answer: SequenceOpened | PlanAccepted) -> None:
    attention = NotingAttention()
    engine = started_engine(FakeRunner(), attention, queue.Queue(), TIMEOUT_S)
    engine.on_answer(make_attachment(attention, 2), answer)  # of another attachment: nobody's business
    attachment = make_attachment(attention, 3)
    engine.on_attached(attachment)
    engine.on_answer(attachment, answer)
    assert attention.dropped.get(timeout=TIMEOUT_S) in (
        "sequence ab is not being opened",
        "step 7 was not published, or has been answered",
    )
    engine.stop(TIMEOUT_S)
    assert attention.dropped.empty()
