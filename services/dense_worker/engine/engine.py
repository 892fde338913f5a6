"""`Engine`: the dense worker's one engine thread. It owns scheduler, runner and device.

    schedule → publish → collect → update → tell

A plan is published before the step ahead of it has run, so that the attention worker never waits for one.
Everything from outside comes through an inbox and is handled between two steps, and while a GPU runs one.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf

import structlog

from services.common.errors import PeerError, TwostrokeError
from services.dense_worker.engine.attachment import Attachment, AttachmentEnd, AttentionPort
from services.dense_worker.engine.drafts import DraftSource
from services.dense_worker.engine.in_flight import InFlight
from services.dense_worker.engine.inbox import Inbox
from services.dense_worker.engine.observer import EngineCounts, EngineObserver, describe_step
from services.dense_worker.engine.progress import progress_of
from services.dense_worker.engine.scheduler import Scheduler, SchedulerLimits
from services.dense_worker.engine.sequence import FinishReason, Sequence, SequenceOutput
from services.dense_worker.engine.session import PublishedPlan, Session
from services.dense_worker.engine.step_report import StepReport, note_prompt_logprobs, note_times
from services.dense_worker.runner.model_runner import ModelRunner
from services.rpc.watchdog import Progress
from services.step import PlanAccepted, SequenceOpened, StepPlan, StepResult, spans_of

log = structlog.get_logger()

_STEPS_BEFORE_OPENING = 2  # that the attention worker may have to run first: one under way, and one planned ahead


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
        drafts: DraftSource | None = None,
    ) -> None:
        self._scheduler = Scheduler(limits, drafts)
        self._runner = runner
        self._attention = attention
        self._deliver = deliver
        self._on_failure = on_failure
        self._result_timeout_s = result_timeout_s
        self._observers = observers
        self._inbox = Inbox()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._session: Session | None = None  # None: not attached
        self._is_stopping = False
        self._is_leaving = False
        self._current: StepPlan | None = None  # being launched or completed
        self._num_completed = 0  # steps
        self._last_end_s = 0.0  # of the step before, on the monotonic clock
        self._duration_s = 0.0  # of the step before

    @property
    def counts(self) -> EngineCounts:
        """As of now, from any thread."""
        scheduler = self._scheduler
        return EngineCounts(
            scheduler.num_waiting,
            scheduler.num_opening,
            scheduler.num_running,
            scheduler.num_steps,
            scheduler.num_preemptions,
            self._session is not None,
        )

    def progress(self, num_layers: int) -> Progress | None:
        """For the watchdog, from any thread; None without work, or without an attention worker to do it with."""
        session, plan = self._session, self._current
        return session and progress_of(session, plan, self.counts, self._num_completed, num_layers)

    def spans_under_way(self) -> dict[int, range]:
        """What tokens of which sequences, by seq_id, are being computed, or were when the last attachment ended.

        May be called from any thread.
        """
        return spans_of(self._scheduler.session.under_way)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def stop(self, timeout_s: float) -> None:
        """Ends the thread after the step it is in; blocks up to `timeout_s` seconds."""
        self._inbox.post(self._stop)
        self._thread.join(timeout_s)

    def submit(self, sequence: Sequence) -> None:
        """Queues a sequence; a refusal comes back as an output with an error."""
        self._inbox.post(self._add, sequence)

    def cancel(self, seq_id: int) -> None:
        """Forgets a sequence."""
        self._inbox.post(self._scheduler.cancel, seq_id)

    def close_unclaimed(self, gateway: int) -> None:
        """All sequences of this gateway have been submitted: what else is held of it can go."""
        self._inbox.post(self._scheduler.close_unclaimed, gateway)

    def leave(self) -> None:
        """Gives the attachment up after the step under way, whose tokens are delivered."""
        self._inbox.post(self._leave)

    def on_attached(self, attachment: Attachment) -> None:
        self._inbox.post(self._attach, attachment)

    def on_detached(self, attachment: Attachment, end: AttachmentEnd) -> None:
        self._inbox.post(self._detach, attachment, end)

    def on_answer(self, attachment: Attachment, answer: SequenceOpened | PlanAccepted) -> None:
        self._inbox.post(self._handle_answer, attachment, answer)

    def _run(self) -> None:
        try:
            in_flight: InFlight | None = None
            is_idle = True
            while not self._is_stopping:
                self._inbox.handle_all(is_idle)
                self._check_deadlines()
                published = None if self._session is None else self._step(self._session, in_flight)
                is_idle = in_flight is None and published is None
                in_flight = published
        except BaseException as error:
            self._on_failure(error)

    def _step(self, session: Session, ahead: InFlight | None) -> InFlight | None:
        """Publishes the next plan, then completes the one ahead of it. Returns what is in flight now."""
        in_flight = None
        try:
            self._open(session)
            published = self._schedule(ahead)
            if published is not None:
                in_flight = self._publish(session, published)
            if ahead is not None and ahead.session is session:
                result, wait_s = self._collect(ahead)
                report = self._update(ahead, result)
                self._tell(ahead, report, wait_s)
        except PeerError as error:
            self._give_up(session, AttachmentEnd(str(error), is_crash=True))
            return None
        finally:
            self._current = None
        if self._is_leaving and in_flight is None:
            self._give_up(session, AttachmentEnd("another dense worker takes over", is_crash=False))
        return in_flight

    def _open(self, session: Session) -> None:
        """Asks the attention worker to open those that are near the head of the queue."""
        if self._is_leaving or not (admitted := self._scheduler.next_to_open()):
            return
        new_sequences = tuple(session.openings[sequence.seq_id].new for sequence in admitted)
        self._attention.publish(session.attachment, StepPlan(0, new_sequences=new_sequences))
        # The gateways know of it by the time that the attention worker has answered: before any step.
        self._deliver(StepReport(0, admitted=admitted))

    def _schedule(self, ahead: InFlight | None) -> PublishedPlan | None:
        if self._is_leaving or (ahead is not None and not self._scheduler.plans_ahead):
            return None
        return self._scheduler.schedule()

    def _publish(self, session: Session, published: PublishedPlan) -> InFlight:
        """Sends the plan to the attention worker, and launches the step."""
        start_s = time.monotonic()
        self._current = published.plan
        session.under_way += (published.plan,)
        self._attention.publish(session.attachment, published.plan)
        channel = session.attachment.channels[published.plan.lane]
        step = self._runner.launch(published.plan, channel)
        return InFlight(session, published, step, start_s, time.monotonic() - start_s)

    def _collect(self, in_flight: InFlight) -> tuple[StepResult, float | None]:
        session = in_flight.session
        self._current = in_flight.published.plan
        return in_flight.collect(
            self._inbox, lambda: self._session is session, lambda: self._open(session), self._result_timeout_s
        )

    def _update(self, in_flight: InFlight, result: StepResult) -> StepReport:
        """Hands the step's tokens to their sequences."""
        begin_s, end_s = max(self._last_end_s, in_flight.launch_start_s), time.monotonic()
        self._last_end_s, self._duration_s = end_s, end_s - begin_s
        self._num_completed += 1
        in_flight.session.under_way = in_flight.session.under_way[1:]
        published = in_flight.published
        # Those that have tokens without a start were submitted again with them.
        sequences = [entry.sequence for entry in published.entries]
        started = [each for each in sequences if each.started_s is None and not each.output_token_ids]
        prompt_logprobs = note_prompt_logprobs(sequences, result.prompt_logprobs) if result.prompt_logprobs else ()
        outputs = self._scheduler.update(published, result)
        note_times(started, outputs, begin_s, end_s)
        return StepReport(published.plan.step_id, started, outputs, result.logprobs, prompt_logprobs)

    def _tell(self, in_flight: InFlight, report: StepReport, wait_s: float | None) -> None:
        """What the step gave goes to the gateways, and then to the observers."""
        if report.started or report.outputs or report.prompt_logprobs:
            self._deliver(report)
        stats = describe_step(in_flight.published.plan, self._scheduler, in_flight.launch_s, self._duration_s, wait_s)
        for observer in self._observers:
            observer.on_step(stats, report.started, report.outputs)

    def _check_deadlines(self) -> None:
        """Of sequences that wait, of blocks that nobody claims, and of openings without an answer."""
        if expired := self._scheduler.expire(time.monotonic()):
            self._deliver(StepReport(0, outputs=expired))
        session, now_s = self._session, time.monotonic()
        if session is None:
            return
        if session.claim_deadline_s is not None and now_s > session.claim_deadline_s:
            session.claim_deadline_s = None
            self._scheduler.close_unclaimed()
        timeout_s = self._result_timeout_s * (1 + _STEPS_BEFORE_OPENING)
        if (oldest := next(iter(session.openings.values()), None)) and now_s - oldest.asked_s > timeout_s:
            reason = f"sequence {oldest.sequence.seq_id:x} has not been opened after {timeout_s:g} s"
            self._give_up(session, AttachmentEnd(reason, is_crash=True))

    def _give_up(self, session: Session, end: AttachmentEnd) -> None:
        self._attention.drop(session.attachment, end)
        self._detach(session.attachment, end)

    def _stop(self) -> None:
        self._is_stopping = True

    def _leave(self) -> None:
        self._is_leaving = True

    def _add(self, sequence: Sequence) -> None:
        try:
            self._scheduler.add(sequence)
        except TwostrokeError as error:
            self._deliver(StepReport(0, outputs=[SequenceOutput(sequence, (), FinishReason.ERROR, error)]))

    def _attach(self, attachment: Attachment) -> None:
        self._is_leaving = False
        self._runner.attach(attachment.channels)
        self._session = Session(attachment)  # from now on the watchdog looks; on a GPU to get here takes its time
        self._scheduler.begin(self._session)
        log.info("attached", epoch=f"{attachment.epoch:016x}", num_blocks=attachment.num_blocks)
        self._attention.ready(attachment)

    def _detach(self, attachment: Attachment, end: AttachmentEnd) -> None:
        if self._session is not None and self._session.attachment is attachment:
            self._session = None
            attachment.abort()  # lets what has been launched run through
            attachment.close()  # now: the next attachment may need the room
            for observer in self._observers:
                observer.on_handoff_abort()
            (log.warning if end.is_crash else log.info)("detached", reason=end.reason, is_crash=end.is_crash)

    def _handle_answer(self, attachment: Attachment, answer: SequenceOpened | PlanAccepted) -> None:
        session = self._session
        if session is None or session.attachment is not attachment:
            return
        try:
            if isinstance(answer, PlanAccepted):
                outputs = self._scheduler.accepted(answer)
            else:
                outputs = self._opened(session, answer)
        except PeerError as error:
            self._give_up(session, AttachmentEnd(str(error), is_crash=True))
            return
        if outputs:
            self._deliver(StepReport(0, outputs=outputs))

    def _opened(self, session: Session, answer: SequenceOpened) -> list[SequenceOutput]:
        opening = session.openings.get(answer.seq_id)
        output = self._scheduler.opened(answer)
        if answer.error is None and opening is not None:
            self._runner.open(opening.new)
            log.debug("opened", request_id=opening.new.request_id, num_cached_tokens=answer.num_cached_tokens)
        return [] if output is None else [output]
