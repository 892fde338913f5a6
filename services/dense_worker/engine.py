"""`Engine`: the dense worker's one engine thread. It owns scheduler, runner and device.

    schedule → publish → run → update → deliver

A plan is published before the step ahead of it has run, so that the attention worker never waits for one.
Everything from outside comes through an inbox and is handled between two steps, and while a GPU runs one.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Any, Protocol

import structlog

from services.common.errors import PeerError, RequestAborted, TwostrokeError
from services.common.watchdog import Progress
from services.dense_worker.attention_client import Attachment, AttachmentEnd
from services.dense_worker.block_ledger import BlockLedger
from services.dense_worker.model_runner import ModelRunner, RunningStep
from services.dense_worker.observer import EngineCounts, EngineObserver, StepStats
from services.dense_worker.scheduler import Scheduler, SchedulerLimits
from services.dense_worker.sequence import FinishReason, Sequence, SequenceOutput
from services.dense_worker.step_plan import StepPlan, spans_of
from services.dense_worker.step_report import StepReport, note_times, take_prompt_logprobs
from services.pb import attn_pb2

log = structlog.get_logger()

# How long after an attachment the sequences of an earlier dense worker may wait to be submitted again.
CLAIM_S = 30.0
_POLL_S = 20e-6  # how often to look whether a GPU has ended a step
_STEPS_BEFORE_OPENING = 2  # that the attention worker may have to run first: one under way, and one planned ahead


class AttentionPort(Protocol):
    """The engine's way to the attention worker; see `AttentionClient`."""

    def ready(self, attachment: Attachment) -> None: ...
    def publish(self, attachment: Attachment, plan: StepPlan) -> None: ...
    def open(self, attachment: Attachment, sequence: Sequence) -> None: ...
    def drop(self, attachment: Attachment, end: AttachmentEnd) -> None: ...


@dataclass(frozen=True, slots=True)
class InFlight:
    """A published plan and its running step."""

    attachment: Attachment
    plan: StepPlan
    step: RunningStep
    launch_start_s: float  # on the monotonic clock
    launch_s: float  # host time to publish and launch it


class Engine:
    """Call `start`; then `submit`, `cancel` and the `on_...` methods from any thread; at last `stop`.

    `deliver` gets every `StepReport` on the engine thread and must not block. `on_failure` is called once,
    from the engine thread, if that thread ends with an error.
    """

    def __init__(
        self,
        limits: SchedulerLimits,
        runner: ModelRunner,
        attention: AttentionPort,
        deliver: Callable[[StepReport], None],
        on_failure: Callable[[BaseException], None],
        result_timeout_s: float,
        observers: SequenceOf[EngineObserver] = (),
    ) -> None:
        self._scheduler = Scheduler(limits, BlockLedger(1, 0, 0))  # replaced by the first attachment
        self._runner = runner
        self._attention = attention
        self._deliver = deliver
        self._on_failure = on_failure
        self._result_timeout_s = result_timeout_s
        self._observers = observers
        self._last_end_s = 0.0  # of the step before, on the monotonic clock
        self._inbox: queue.SimpleQueue[tuple[Callable[..., None], tuple[Any, ...]]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._is_stopping = False
        self._is_leaving = False
        self._current: StepPlan | None = None  # being launched or completed
        self._num_completed = 0  # steps
        self._under_way: tuple[StepPlan, ...] = ()  # published and not completed, when the last attachment ended
        self._attachment: Attachment | None = None
        self._claim_deadline: float | None = None
        self._published: dict[int, StepPlan] = {}  # by step_id, of which a result may come
        self._asked_s: dict[int, float] = {}  # by seq_id, those being opened, the oldest first; on the monotonic clock
        self._num_errors = 0  # of the attachment, in the results that have come

    @property
    def counts(self) -> EngineCounts:
        """As of now; each number is right, but they may be of two neighbouring steps."""
        scheduler = self._scheduler
        return EngineCounts(
            scheduler.num_waiting,
            scheduler.num_opening,
            scheduler.num_running,
            scheduler.num_steps,
            scheduler.num_preemptions,
            self._attachment is not None,
        )

    def progress(self, num_layers: int) -> Progress | None:
        """For the watchdog, from any thread; None without work, or without an attention worker to do it with."""
        attachment, current, counts = self._attachment, self._current, self.counts
        if attachment is None:
            return None
        num_waits = attachment.channel.num_waits
        counter = (attachment.attachment_id, counts.num_steps, self._num_completed, num_waits or 0)
        if current is not None:
            return Progress(
                counter,
                step_id=current.step_id,
                layer=None if num_waits is None else num_waits % num_layers,
                request_ids=tuple(entry.sequence.request_id for entry in current.entries),
                waits_for="attn_worker" if attachment.channel.is_waiting else "",
            )
        # Between two steps only an answer can be missing; or blocks are, that other gateways may still claim.
        if counts.num_running or counts.num_opening or (counts.num_waiting and self._claim_deadline is None):
            return Progress(counter, waits_for="attn_worker")
        return None

    def spans_under_way(self) -> dict[int, range]:
        """What tokens of which sequences, by seq_id, are being computed, or were when the last attachment ended.

        May be called from any thread.
        """
        return spans_of(self._under_way)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def stop(self, timeout_s: float) -> None:
        """Ends the thread after the step it is in; blocks up to `timeout_s` seconds."""
        self._post(self._stop)
        self._thread.join(timeout_s)

    def submit(self, sequence: Sequence) -> None:
        """Queues a sequence; a refusal comes back as an output with an error."""
        self._post(self._add, sequence)

    def cancel(self, seq_id: int) -> None:
        """Forgets a sequence."""
        self._post(self._scheduler.cancel, seq_id)

    def close_unclaimed(self, gateway: int) -> None:
        """All sequences of this gateway have been submitted: what else is held of it can go."""
        self._post(self._scheduler.close_unclaimed, gateway)

    def leave(self) -> None:
        """Gives the attachment up after the step under way, whose tokens are delivered."""
        self._post(self._leave)

    def on_attached(self, attachment: Attachment) -> None:
        self._post(self._attach, attachment)

    def on_detached(self, attachment: Attachment, end: AttachmentEnd) -> None:
        self._post(self._detach, attachment, end)

    def on_opened(self, attachment: Attachment, sequence: Sequence, opened: attn_pb2.SequenceOpened) -> None:
        self._post(self._opened, attachment, sequence, opened)

    def on_open_failed(self, attachment: Attachment, sequence: Sequence, error: str) -> None:
        self._post(self._open_failed, attachment, sequence, error)

    def on_accepted(self, attachment: Attachment, result: attn_pb2.StepResult) -> None:
        self._post(self._accepted, attachment, result)

    def _run(self) -> None:
        try:
            in_flight: InFlight | None = None
            is_idle = True
            while not self._is_stopping:
                self._handle_inbox(is_idle)
                published = self._step(in_flight)
                is_idle = in_flight is None and published is None
                in_flight = published
        except BaseException as error:
            self._on_failure(error)

    def _step(self, in_flight: InFlight | None) -> InFlight | None:
        """Publishes and launches the next plan, then completes the one before. Returns the one now in flight."""
        attachment = self._attachment
        if attachment is None:
            return None
        self._open_next(attachment)
        plan = None if self._is_leaving else self._scheduler.schedule()
        published = None
        if plan is not None:
            start = time.monotonic()
            self._current = plan
            self._published[plan.step_id] = plan
            self._under_way += (plan,)
            self._attention.publish(attachment, plan)
            step = self._runner.launch(plan)
            published = InFlight(attachment, plan, step, start, time.monotonic() - start)
        if in_flight is not None and in_flight.attachment is attachment:
            self._current = in_flight.plan
            try:
                self._complete(in_flight)
                self._num_completed += 1
                self._under_way = self._under_way[1:]
            except PeerError as error:
                self._current = None
                attachment.channel.abort()
                self._give_up(attachment, AttachmentEnd(str(error), is_crash=True))
                return None
        self._current = None
        if self._is_leaving and published is None:
            self._give_up(attachment, AttachmentEnd("another dense worker takes over", is_crash=False))
        return published

    def _open_next(self, attachment: Attachment) -> None:
        """Asks the attention worker to open those that are near the head of the queue."""
        if self._is_leaving or not (admitted := self._scheduler.next_to_open()):
            return
        for sequence in admitted:
            self._asked_s[sequence.seq_id] = time.monotonic()
            self._attention.open(attachment, sequence)
        # The gateways know of it by the time that the attention worker has answered: before any step.
        self._deliver(StepReport(0, [], [], admitted=admitted))

    def _give_up(self, attachment: Attachment, end: AttachmentEnd) -> None:
        self._attention.drop(attachment, end)
        self._detach(attachment, end)

    def _complete(self, in_flight: InFlight) -> None:
        plan, channel = in_flight.plan, in_flight.attachment.channel
        waited_s = channel.waited_s
        self._await_end(in_flight)
        tokens = in_flight.step.collect()
        begin_s, end_s = max(self._last_end_s, in_flight.launch_start_s), time.monotonic()
        self._last_end_s = end_s
        if channel.num_errors != self._num_errors:
            self._await_errors(in_flight)  # they say whose rows have no meaning
        if not plan.close_seq_ids:
            self._published.pop(plan.step_id, None)  # no result comes any more
        prompt_logprobs = take_prompt_logprobs(tokens) if tokens.prompt_logprobs else []
        # Those that have tokens without a start were submitted again with them.
        sequences = [entry.sequence for entry in plan.entries]
        started = [each for each in sequences if each.started_s is None and not each.output_token_ids]
        outputs = self._scheduler.update(plan, tokens.token_ids)
        note_times(started, outputs, begin_s, end_s)
        if started or outputs or prompt_logprobs:
            self._deliver(StepReport(plan.step_id, started, outputs, tokens.logprobs, prompt_logprobs))
        wait_s = None if waited_s is None else channel.waited_s - waited_s
        stats = self._describe(in_flight, end_s - begin_s, wait_s)
        for observer in self._observers:
            observer.on_step(stats, started, outputs)

    def _describe(self, in_flight: InFlight, duration_s: float, wait_s: float | None) -> StepStats:
        plan, scheduler = in_flight.plan, self._scheduler
        return StepStats(
            step_id=plan.step_id,
            num_seqs=len(plan.entries),
            num_tokens=plan.num_tokens,
            num_sampled=sum(entry.is_sampled for entry in plan.entries),
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            num_preemptions=scheduler.num_preemptions,
            num_blocks=scheduler.ledger.num_blocks,
            num_free_blocks=scheduler.ledger.num_free_blocks,
            num_reserved_blocks=scheduler.ledger.num_reserved_blocks,
            launch_s=in_flight.launch_s,
            duration_s=duration_s,
            wait_s=wait_s,
        )

    def _await_end(self, in_flight: InFlight) -> None:
        """Handles what comes while a GPU runs the step, so that new sequences are open when the next one is planned."""
        deadline = time.monotonic() + self._result_timeout_s
        while not in_flight.step.is_done():
            if self._handle_one(in_flight.attachment, _POLL_S):
                self._open_next(in_flight.attachment)
            if time.monotonic() > deadline:  # however much comes
                raise PeerError(f"step {in_flight.plan.step_id} has not ended after {self._result_timeout_s} s")

    def _await_errors(self, in_flight: InFlight) -> None:
        """Handles what comes until all errors are here that the attention worker has counted."""
        deadline = time.monotonic() + self._result_timeout_s
        while self._num_errors != in_flight.attachment.channel.num_errors:
            left_s = deadline - time.monotonic()  # however much else comes
            if left_s <= 0.0 or not self._handle_one(in_flight.attachment, left_s):
                raise PeerError(
                    f"errors up to step {in_flight.plan.step_id} are not here after {self._result_timeout_s} s"
                )

    def _handle_one(self, attachment: Attachment, timeout_s: float) -> bool:
        """Whether something has come within `timeout_s`. Raises `PeerError` if it ends the attachment."""
        try:
            function, arguments = self._inbox.get(timeout=timeout_s)
        except queue.Empty:
            return False
        function(*arguments)
        if self._attachment is not attachment:
            raise PeerError("the attention worker went away")
        return True

    def _handle_inbox(self, is_idle: bool) -> None:
        """Handles all that has come, and whose time is over; when idle, sleeps until something comes or a second."""
        while True:
            try:
                function, arguments = self._inbox.get(block=is_idle, timeout=1.0 if is_idle else None)
            except queue.Empty:
                break
            function(*arguments)
            is_idle = False
        if self._claim_deadline is not None and time.monotonic() > self._claim_deadline:
            self._claim_deadline = None
            self._scheduler.close_unclaimed()
        if expired := self._scheduler.expire(time.monotonic()):
            self._deliver(StepReport(0, [], expired))
        self._check_openings()

    def _check_openings(self) -> None:
        """Gives an attachment up that does not answer."""
        timeout_s = self._result_timeout_s * (1 + _STEPS_BEFORE_OPENING)
        if self._attachment is not None and self._asked_s:
            seq_id, asked_s = next(iter(self._asked_s.items()))
            if time.monotonic() - asked_s > timeout_s:
                reason = f"sequence {seq_id:x} has not been opened after {timeout_s:g} s"
                self._give_up(self._attachment, AttachmentEnd(reason, is_crash=True))

    def _post(self, function: Callable[..., None], *arguments: Any) -> None:
        self._inbox.put((function, arguments))

    def _stop(self) -> None:
        self._is_stopping = True

    def _add(self, sequence: Sequence) -> None:
        try:
            self._scheduler.add(sequence)
        except TwostrokeError as error:
            self._deliver(StepReport(0, [], [SequenceOutput(sequence, None, FinishReason.ERROR, error)]))

    def _leave(self) -> None:
        self._is_leaving = True

    def _attach(self, attachment: Attachment) -> None:
        self._is_leaving = False
        self._published.clear()
        self._under_way = ()
        self._asked_s.clear()
        self._num_errors = 0
        self._runner.attach(attachment.channel)
        self._attachment = attachment  # from now on the watchdog looks; on a GPU to get here takes its time
        ledger = BlockLedger(attachment.block_size, attachment.num_blocks, attachment.num_free_blocks)
        self._scheduler.reset(ledger, attachment.held_blocks)
        self._claim_deadline = time.monotonic() + CLAIM_S if attachment.held_blocks else None
        log.info("attached", epoch=f"{attachment.epoch:016x}", num_blocks=attachment.num_blocks)
        self._attention.ready(attachment)

    def _detach(self, attachment: Attachment, end: AttachmentEnd) -> None:
        if self._attachment is attachment:
            self._attachment = None
            attachment.channel.abort()  # lets what has been launched run through
            attachment.channel.close()  # now: the next attachment may need the room
            for observer in self._observers:
                observer.on_handoff_abort()
            (log.warning if end.is_crash else log.info)("detached", reason=end.reason, is_crash=end.is_crash)

    def _opened(self, attachment: Attachment, sequence: Sequence, opened: attn_pb2.SequenceOpened) -> None:
        if attachment is self._attachment:
            del self._asked_s[sequence.seq_id]
            log.debug("opened", request_id=sequence.request_id, num_cached_tokens=opened.num_cached_tokens)
            self._scheduler.opened(
                sequence,
                opened.num_cached_tokens,
                opened.num_pinned_blocks,
                opened.num_held_blocks,
                opened.num_freed_blocks,
            )

    def _open_failed(self, attachment: Attachment, sequence: Sequence, error: str) -> None:
        if attachment is self._attachment:
            del self._asked_s[sequence.seq_id]
            output = self._scheduler.open_failed(sequence, RequestAborted(error))
            if output is not None:
                self._deliver(StepReport(0, [], [output]))

    def _accepted(self, attachment: Attachment, result: attn_pb2.StepResult) -> None:
        plan = self._published.pop(result.step_id, None) if attachment is self._attachment else None
        if plan is None:
            return  # of an attachment that is gone
        self._num_errors += len(result.errors)
        errors = {error.seq_id: RequestAborted(error.message) for error in result.errors}
        outputs = self._scheduler.accepted(plan, result.num_freed_blocks, errors)
        if outputs:
            self._deliver(StepReport(plan.step_id, [], outputs))
