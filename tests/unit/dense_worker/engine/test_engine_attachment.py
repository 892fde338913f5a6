"""The engine thread and its attachment: when the engine is ready, when it drops the attachment, and lost steps."""

from __future__ import annotations

import dataclasses
import queue
import threading
import time
from types import SimpleNamespace

import pytest

from services.common.errors import PeerError
from services.common.sampling_params import SamplingParams
from services.dense_worker.engine.attachment import AttachedCache, Attachment, AttachmentEnd
from services.dense_worker.engine.step_report import StepReport
from services.step import NewSequence, PlanAccepted, SequenceOpened, StepPlan
from tests.support.clients.steady_stream import wait_until
from tests.support.dense.sequences import new_sequence
from tests.support.scripted_attention import (
    DELAY_S,
    TIMEOUT_S,
    FakeAttention,
    FakeRunner,
    FakeStep,
    RecordingAttention,
    SilentAttention,
    SlowRunner,
    SlowStep,
    make_attachment,
    started_engine,
)


def test_an_engine_is_ready_when_its_runner_has_attached() -> None:
    may_attach = threading.Event()

    class CapturingRunner(FakeRunner):
        def attach(self, channels: object, ranks: object) -> None:
            assert may_attach.wait(TIMEOUT_S)

    attention = FakeAttention(bad_step=0)
    engine = started_engine(CapturingRunner(), attention, queue.Queue(), TIMEOUT_S)
    time.sleep(DELAY_S)
    assert attention.ready_for.empty()
    may_attach.set()
    assert attention.ready_for.get(timeout=TIMEOUT_S) == 1
    engine.stop(TIMEOUT_S)


def test_an_attachment_whose_ranks_part_before_it_is_ready_is_given_up_and_the_next_one_serves() -> None:
    class CapturingRunner(FakeRunner):
        num_attached = 0

        def attach(self, channels: object, ranks: object) -> None:
            self.num_attached += 1
            if self.num_attached == 1:
                raise PeerError("the ranks have been given up")

    attention, calls = RecordingAttention(), queue.Queue[str]()
    attention.channel.abort, attention.channel.close = lambda: calls.put("abort"), lambda: calls.put("close")
    engine = started_engine(CapturingRunner(), attention, queue.Queue(), TIMEOUT_S)
    assert attention.dropped.get(timeout=TIMEOUT_S) == "the ranks have been given up"
    assert [calls.get(timeout=TIMEOUT_S) for _ in range(2)] == ["abort", "close"]
    engine.on_attached(make_attachment(attention, 2))
    assert attention.ready_for.get(timeout=TIMEOUT_S) == 2
    assert attention.ready_for.empty()
    engine.stop(TIMEOUT_S)


def test_published_steps_are_delivered_before_the_engine_leaves() -> None:
    runner, attention, reports = SlowRunner(), RecordingAttention(), queue.Queue()
    engine = started_engine(runner, attention, reports, TIMEOUT_S)
    engine.submit(new_sequence(1, "r1", [5, 6, 7], SamplingParams(), max_tokens=20))
    for _ in range(2):
        runner.launched.get(timeout=TIMEOUT_S)
    engine.leave()
    time.sleep(DELAY_S)
    assert attention.dropped.empty(), "the engine left while two steps were under way"
    runner.has_ended.set()
    assert attention.dropped.get(timeout=TIMEOUT_S) == "another dense worker takes over"
    engine.stop(TIMEOUT_S)
    assert runner.launched.empty(), "no further step may be planned"
    assert [output.token_ids for report in reports.queue for output in report.outputs] == [[9], [9]]


def test_the_data_region_of_a_worker_that_comes_after_its_attachment_is_unmapped() -> None:
    attention, called = FakeAttention(bad_step=0), queue.Queue[str]()
    engine = started_engine(FakeRunner(), attention, queue.Queue(), TIMEOUT_S)
    cache = AttachedCache(7, 10, 10, {})
    past, present = make_attachment(attention, 2), make_attachment(attention, 3)
    engine.on_attached(past)
    engine.on_detached(past, AttachmentEnd("gone", is_crash=True))
    engine.on_attached(present)
    for attachment, expected in ((past, "dropped"), (present, "added")):
        engine.on_cache_added(attachment, cache, lambda: called.put("added"), lambda: called.put("dropped"))
        assert called.get(timeout=TIMEOUT_S) == expected
    engine.stop(TIMEOUT_S)


def test_a_cache_that_leaves_is_kept_as_soon_as_a_request_comes_that_no_other_one_could_hold() -> None:
    kept = queue.Queue[tuple[int, str]]()

    class KeepingAttention(RecordingAttention):
        def keep(self, attachment: Attachment, cache_id: int, reason: str) -> None:
            kept.put((cache_id, reason))

    runner, attention = SlowRunner(), KeepingAttention()
    engine = started_engine(runner, attention, queue.Queue(), TIMEOUT_S)
    engine.submit(new_sequence(1, "r1", [5, 6, 7], SamplingParams(), max_tokens=20))
    runner.launched.get(timeout=TIMEOUT_S)
    attachment = attention.attachment
    assert attachment is not None
    engine.on_cache_added(attachment, AttachedCache(1, 8, 0, {}), lambda: None, lambda: None)
    engine.on_cache_given_up(attachment, 0, True)  # what runs there would fit into the other one, which is full
    for seq_id, max_tokens in ((2, 27), (3, 28)):
        engine.submit(new_sequence(seq_id, "", [5, 6, 7, 8, 9, 10], SamplingParams(), max_tokens=max_tokens))
    cache_id, reason = kept.get(timeout=TIMEOUT_S)  # while the first sequence is still there
    runner.has_ended.set()
    engine.stop(TIMEOUT_S)
    assert cache_id == 0
    assert reason == "a request needs 9 KV cache blocks, of those that would be left the cache has 8"


def test_steps_lost_with_an_attachment_are_run_again_by_the_next() -> None:
    runner, attention, reports = SlowRunner(), RecordingAttention(), queue.Queue()
    engine = started_engine(runner, attention, reports, TIMEOUT_S)
    engine.submit(new_sequence(1, "r1", [5, 6, 7], SamplingParams(), max_tokens=3))
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
    assert tokens == [9, 9, 9] and reports.empty(), "lost steps are run again and reported once"
    assert list(attention.opened.queue) == [1, 1]


def test_cached_tokens_are_those_of_the_first_step_that_was_not_lost() -> None:
    class ForgettingAttention(RecordingAttention):
        """Has a block of the prompt at its first opening, and none afterwards."""

        def open(self, attachment: Attachment, new: NewSequence) -> None:
            self.attachment, num_blocks = attachment, 1 - len(self.opened.queue)
            self.opened.put(new.seq_id)
            assert self.engine is not None
            self.engine.on_answer(attachment, SequenceOpened(new.seq_id, 4 * num_blocks, num_blocks, num_blocks))

    runner, attention, reports = SlowRunner(), ForgettingAttention(), queue.Queue[StepReport]()
    engine = started_engine(runner, attention, reports, TIMEOUT_S)
    engine.submit(new_sequence(1, "r1", [5] * 6, SamplingParams(), max_tokens=3))
    while not (started := reports.get(timeout=TIMEOUT_S).started):  # reported while the step runs
        pass
    [first] = started
    assert first.num_cached_tokens == 4 and attention.attachment is not None
    engine.on_detached(attention.attachment, AttachmentEnd("gone", is_crash=True))
    engine.on_attached(make_attachment(attention, 2))
    while attention.ready_for.get(timeout=TIMEOUT_S) != 2:  # otherwise the step might end before it is lost
        pass
    runner.has_ended.set()
    num_tokens, found = 0, []
    while num_tokens < 3:
        report = reports.get(timeout=TIMEOUT_S)
        found += [each.num_cached_tokens for each in report.started]
        num_tokens += sum(len(each.token_ids) for each in report.outputs)
    engine.stop(TIMEOUT_S)
    assert found == [0] and list(attention.opened.queue) == [1, 1]


def test_what_a_sequence_has_computed_for_a_dead_dense_worker_does_not_count_as_cached() -> None:
    class KeepingAttention(RecordingAttention):
        """Has kept two blocks of each prompt, of which it had found one."""

        def open(self, attachment: Attachment, new: NewSequence) -> None:
            assert self.engine is not None
            self.engine.on_answer(attachment, SequenceOpened(new.seq_id, 8, 0, 2, num_recovered_tokens=4))

    runner, attention, reports = SlowRunner(), KeepingAttention(), queue.Queue[StepReport]()
    runner.has_ended.set()
    engine = started_engine(runner, attention, reports, TIMEOUT_S)
    engine.submit(new_sequence(1, "r1", [5] * 10, SamplingParams(), max_tokens=3))
    while not (started := reports.get(timeout=TIMEOUT_S).started):
        pass
    engine.stop(TIMEOUT_S)
    assert [each.num_cached_tokens for each in started] == [4]


def test_an_ended_attachment_is_unmapped_before_the_next_one() -> None:
    """The channel is aborted before that, so that the GPU ends the running step."""
    runner, attention = SlowRunner(), RecordingAttention()
    actions: queue.Queue[str] = queue.Queue()
    attention.channel.abort = lambda: (actions.put("abort"), runner.has_ended.set())
    attention.channel.close = lambda: actions.put("close")
    engine = started_engine(runner, attention, queue.Queue(), TIMEOUT_S)
    engine.submit(new_sequence(1, "r1", [5, 6, 7], SamplingParams(), max_tokens=3))
    for _ in range(2):
        runner.launched.get(timeout=TIMEOUT_S)
    assert attention.attachment is not None
    assert engine.spans_under_way() == {1: range(4)}, "the prompt's three tokens, and the one sampled from it"
    engine.on_detached(attention.attachment, AttachmentEnd("gone", is_crash=True))
    assert [actions.get(timeout=TIMEOUT_S) for _ in range(2)] == ["abort", "close"]
    assert engine.spans_under_way() == {1: range(4)}, "they are needed for the farewell to gateways"
    engine.stop(TIMEOUT_S)
    assert "close" not in actions.queue, "the channel was closed twice"


def test_a_step_that_never_ends_drops_the_attachment() -> None:
    attention = RecordingAttention()
    engine = started_engine(SlowRunner(), attention, queue.Queue(), timeout_s=0.05)
    engine.submit(new_sequence(1, "r1", [5, 6, 7], SamplingParams(), max_tokens=4))
    assert "step 1 has not ended after 0.05 s" in attention.dropped.get(timeout=TIMEOUT_S)
    engine.stop(TIMEOUT_S)


def test_a_step_that_never_ends_drops_the_attachment_of_a_busy_engine() -> None:
    class BusyStep(FakeStep):
        """A step that never ends. Every check adds a call to the engine's queue."""

        def is_done(self) -> bool:
            assert attention.engine is not None
            attention.engine.cancel(seq_id=99)
            return False

    class BusyRunner(FakeRunner):
        def launch(self, plan: StepPlan, channel: object) -> BusyStep:
            return BusyStep(plan)

    attention = RecordingAttention()
    engine = started_engine(BusyRunner(), attention, queue.Queue(), timeout_s=0.05)
    engine.submit(new_sequence(1, "r1", [5, 6, 7], SamplingParams(), max_tokens=4))
    assert "step 1 has not ended after 0.05 s" in attention.dropped.get(timeout=TIMEOUT_S)
    engine.stop(TIMEOUT_S)


def test_an_error_that_is_never_reported_drops_the_attachment_of_a_busy_engine() -> None:
    class BusyChannel(SimpleNamespace):
        """Counts an error that is never reported. Every check adds a call to the engine's queue."""

        @property
        def num_errors(self) -> int:
            assert attention.engine is not None
            attention.engine.cancel(seq_id=99)
            return 1

    attention = RecordingAttention()
    attention.channel = BusyChannel(
        lost_caches=(),
        num_waits=None,
        is_waiting=False,
        waited_s=0.0,
        abort=lambda: None,
        close=lambda: None,
    )
    engine = started_engine(FakeRunner(), attention, queue.Queue(), timeout_s=0.05)
    engine.submit(new_sequence(1, "r1", [5, 6, 7], SamplingParams(), max_tokens=4))
    assert "errors up to step 1 are not here after 0.05 s" in attention.dropped.get(timeout=TIMEOUT_S)
    engine.stop(TIMEOUT_S)


def test_an_opening_without_an_answer_drops_the_attachment() -> None:
    attention = SilentAttention()
    engine = started_engine(FakeRunner(), attention, queue.Queue(), timeout_s=0.05)
    engine.submit(new_sequence(0xAB, "r1", [5, 6, 7], SamplingParams(), max_tokens=4))
    assert attention.dropped.get(timeout=TIMEOUT_S) == "sequence ab has not been opened after 0.15 s"
    assert attention.opened.get(timeout=TIMEOUT_S) == 0xAB
    engine.on_attached(make_attachment(attention, 2))
    assert attention.opened.get(timeout=TIMEOUT_S) == 0xAB
    engine.stop(TIMEOUT_S)


def test_an_answer_that_comes_during_a_long_step_is_in_time() -> None:
    timeout_s = 0.05

    class LongRunner(FakeRunner):
        """Each launch takes longer than an opening may, like the first one of a kernel that is compiled."""

        def launch(self, plan: StepPlan, channel: object) -> FakeStep:
            if plan.step_id == 1:
                engine.submit(new_sequence(2, "r2", [5, 6, 7], SamplingParams(), max_tokens=4))
            time.sleep(4 * timeout_s)
            return super().launch(plan, channel)

    attention, reports = RecordingAttention(), queue.Queue[StepReport]()
    engine = started_engine(LongRunner(), attention, reports, timeout_s)
    engine.submit(new_sequence(1, "r1", [5, 6, 7], SamplingParams(), max_tokens=4))
    num_tokens = {1: 0, 2: 0}
    while num_tokens != {1: 4, 2: 4}:
        for output in reports.get(timeout=TIMEOUT_S).outputs:
            num_tokens[output.sequence.seq_id] += len(output.token_ids)
    engine.stop(TIMEOUT_S)
    assert attention.dropped.empty()
    assert list(attention.opened.queue) == [1, 2]


@pytest.mark.parametrize("answer", [SequenceOpened(0xAB), PlanAccepted(7)])
def test_an_unexpected_answer_drops_the_attachment(answer: SequenceOpened | PlanAccepted) -> None:
    attention = RecordingAttention()
    engine = started_engine(FakeRunner(), attention, queue.Queue(), TIMEOUT_S)
    engine.on_answer(make_attachment(attention, 2), answer)  # of another attachment, so the engine ignores it
    attachment = make_attachment(attention, 3)
    engine.on_attached(attachment)
    engine.on_answer(attachment, answer)
    assert attention.dropped.get(timeout=TIMEOUT_S) in (
        "sequence ab is not being opened",
        "step 7 was not published, or has been answered",
    )
    engine.stop(TIMEOUT_S)
    assert attention.dropped.empty()


def test_an_attachment_ends_in_all_its_lanes() -> None:
    attention = RecordingAttention()
    actions: queue.Queue[tuple[str, int]] = queue.Queue()
    lanes = {
        lane: SimpleNamespace(
            abort=lambda lane=lane: actions.put(("abort", lane)), close=lambda lane=lane: actions.put(("close", lane))
        )
        for lane in (0, 1)
    }
    engine = started_engine(FakeRunner(), attention, queue.Queue(), TIMEOUT_S)
    attachment = dataclasses.replace(make_attachment(attention, 2), channels=lanes)
    engine.on_attached(attachment)
    engine.on_detached(attachment, AttachmentEnd("gone", is_crash=True))
    expected = [("abort", 0), ("abort", 1), ("close", 0), ("close", 1)]
    assert [actions.get(timeout=TIMEOUT_S) for _ in expected] == expected
    engine.stop(TIMEOUT_S)


class EagerRunner(SlowRunner):
    """Has three graphs to capture, each when it is allowed to."""

    def __init__(self) -> None:
        super().__init__()
        self.num_left, self.has_begun, self.may_end = 3, threading.Event(), threading.Semaphore(0)
        self.events: list[str] = []

    def capture_ahead(self) -> bool:
        if not self.num_left:
            return False
        self.has_begun.set()
        assert self.may_end.acquire(timeout=TIMEOUT_S)
        self.num_left -= 1
        self.events.append("captured")
        return True


def test_an_idle_engine_captures_graphs_one_at_a_time_and_none_while_a_sequence_waits_or_runs() -> None:
    runner = EagerRunner()
    engine = started_engine(runner, RecordingAttention(), queue.Queue(), TIMEOUT_S)
    assert runner.has_begun.wait(TIMEOUT_S)
    engine.submit(new_sequence(1, "r1", [5, 6, 7], SamplingParams(), max_tokens=2))
    runner.may_end.release()  # the one that has begun: another one would wait for the next release
    runner.launched.get(timeout=TIMEOUT_S)
    assert runner.num_left == 2
    runner.has_ended.set()
    runner.may_end.release(2)
    wait_until(lambda: runner.num_left == 0)
    engine.stop(TIMEOUT_S)


def test_an_engine_that_leaves_captures_nothing_for_what_it_has_closed() -> None:
    runner, attention = EagerRunner(), RecordingAttention()
    engine = started_engine(runner, attention, queue.Queue(), TIMEOUT_S)
    assert runner.has_begun.wait(TIMEOUT_S)
    attention.channel.close = lambda: runner.events.append("closed")
    engine.leave()
    runner.may_end.release(3)
    attention.dropped.get(timeout=TIMEOUT_S)
    time.sleep(DELAY_S)
    engine.stop(TIMEOUT_S)
    assert runner.events == ["captured", "closed"]


def test_the_next_plan_leaves_before_a_step_waits_for_what_samples_it() -> None:
    events: queue.Queue[tuple[str, int]] = queue.Queue()

    class UnsampledStep(SlowStep):
        """It ends when it has been sampled, for which something is missing until somebody waits for it."""

        def sample(self, *, waits: bool) -> None:
            if waits:
                events.put(("sample", self.plan.step_id))
                self.has_ended.set()

    class UnsampledRunner(FakeRunner):
        def launch(self, plan: StepPlan, channel: object) -> UnsampledStep:
            events.put(("launch", plan.step_id))
            return UnsampledStep(plan, threading.Event())

    reports: queue.Queue[StepReport] = queue.Queue()
    engine = started_engine(UnsampledRunner(), FakeAttention(bad_step=0), reports, timeout_s=TIMEOUT_S)
    engine.submit(new_sequence(1, "r1", [5, 6, 7], SamplingParams(), max_tokens=3))
    found = [events.get(timeout=TIMEOUT_S) for _ in range(5)]
    engine.stop(TIMEOUT_S)
    assert found == [("launch", 1), ("launch", 2), ("sample", 1), ("launch", 3), ("sample", 2)]
