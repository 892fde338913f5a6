"""`Engine`: the dense worker's one engine thread. It owns scheduler, runner and device.

    admit → schedule → publish → collect → update → report

A plan is published while the previous step still runs, so that the attention worker never waits for a plan, but as late
as that allows, so that a client who comes before that waits for no other step: on a GPU near the step's predicted end
(`PlanTiming`). A long step on a CPU is run in two parts, and the next plan is published between them. The thread
handles calls from outside between two steps, while a GPU runs a step, and between these two parts.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from concurrent.futures import Future

import numpy as np
import structlog

from services.common.engine_thread import IDLE_POLL_S
from services.common.errors import PeerError, TwostrokeError
from services.common.process import collect_young
from services.dense_worker.engine import step_report
from services.dense_worker.engine.attachment import AttachedCache, Attachment, AttachmentEnd, AttentionPort
from services.dense_worker.engine.gateway_engine import GatewayEngine
from services.dense_worker.engine.observer import CacheCounts, EngineCounts, EngineObserver, StepStats
from services.dense_worker.engine.rehearsal import Rehearsal
from services.dense_worker.engine.scheduler import Scheduler
from services.dense_worker.engine.sequence import AFTER_SUSPECT_S, Sequence, SequenceOutput, SequenceStatus
from services.dense_worker.engine.session import ScheduledStep, Session
from services.dense_worker.engine.step_report import StepReport
from services.dense_worker.features.feature import Event
from services.dense_worker.runner.model_runner import StepRunner
from services.rpc.watchdog import Progress
from services.step import PlanAccepted, SequenceOpened, StepPlan, StepResult, spans_of

log = structlog.get_logger()

_POLL_S = 20e-6  # how often to look whether a GPU has ended a step, while it has no further one
_AHEAD_POLL_S = 70e-6  # the same while it has one, and only the gateways wait
_CALLS_S = 0.5e-3  # how long calls that have come are made before it is looked once which sequences they let open
_LOOK_S = 0.5e-3  # the same while the next plan waits: a step may end before its predicted end
# Of a longer step three quarters run before the next plan leaves. The rest is time for it to arrive, about 1 ms.
_LONG_STEP_S = 0.012
_REHEARSAL_PAUSE_S = 0.01  # at least, so that a flood of requests that are refused takes no more of the processor
_STEPS_BEFORE_OPENING = 2  # steps that the attention worker may run first: the running one, and one planned ahead


class Engine(GatewayEngine):
    """Gets what attention workers say by the `on_...` methods, which any thread may call.

    `deliver` receives every `StepReport` on the engine thread and must not block.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: StepRunner,
        attention: AttentionPort,
        deliver: Callable[[StepReport], None],
        result_timeout_s: float,
        observers: SequenceOf[EngineObserver] = (),
    ) -> None:
        super().__init__()
        self._scheduler = scheduler
        self._runner = runner
        self._attention = attention
        self._deliver = deliver
        self._result_timeout_s = result_timeout_s
        self._observers = tuple(observers)
        self._timing = PlanTiming()
        self._rehearsal: Rehearsal | None = None  # None: steps are not rehearsed
        self._rehearsed_s = 0.0  # when that was last done
        self._has_run_suspect = False  # since the last opening
        for feature in scheduler.features:
            feature.start(self.on_event)

    @property
    def _session(self) -> Session:
        """The present one, or the last one, which has ended."""
        return self._scheduler.session

    @property
    def counts(self) -> EngineCounts:
        scheduler, is_attached = self._scheduler, not self._session.has_ended
        return EngineCounts(
            scheduler.num_waiting,
            scheduler.num_opening,
            scheduler.num_running,
            scheduler.num_steps,
            scheduler.num_preemptions,
            is_attached,
        )

    def progress(self, num_layers: int) -> Progress | None:
        """The progress for the watchdog; None without work or attention worker. May be called from any thread."""
        session = self._session
        return None if session.has_ended else progress_of(session, self.counts, num_layers)

    @property
    def caches(self) -> list[CacheCounts]:
        session = self._session
        num_sequences = Counter(cache_id for each in list(session.running) for cache_id in each.cache_ids)
        return [
            CacheCounts(cache_id, num_sequences[cache_id], ledger.num_blocks, ledger.num_free_blocks)
            for cache_id, ledger in list(session.ledgers.items())
        ]

    def spans_under_way(self) -> dict[int, range]:
        return spans_of(step.plan for step in self._session.in_flight)

    def close_orphans(self, gateway: int) -> None:
        self._thread.post(self._scheduler.close_orphans, gateway)

    def forget_prefixes(self, generation: int | None) -> Future[int]:
        return self._thread.submit(self._scheduler.forget_prefixes, generation)

    def on_event(self, event: Event) -> None:
        """Something has happened to the resources of a feature."""
        self._thread.post(self._handle_event, event)

    def expect(self) -> None:
        if self._may_rehearse():  # a call would have a busy engine look whom to open
            self._thread.post(self._expect)

    def on_attached(self, attachment: Attachment) -> None:
        self._thread.post(self._attach, attachment)

    def on_detached(self, attachment: Attachment, end: AttachmentEnd) -> None:
        self._thread.post(self._detach, attachment, end)

    def on_cache_added(
        self,
        attachment: Attachment,
        cache: AttachedCache,
        add_seam: Callable[[], None],
        drop_seam: Callable[[], None],
    ) -> None:
        """One more attention worker has attached.

        One of both is called on the engine thread: `add_seam` adds its data regions to the attachment's channels,
        `drop_seam` unmaps them because the attachment has ended.
        """
        self._thread.post(self._add_cache, attachment, cache, add_seam, drop_seam)

    def on_cache_given_up(self, attachment: Attachment, cache_id: int, is_given_up: bool) -> None:
        """One of several attention workers is to go, or is to stay after all."""
        self._thread.post(self._give_up_cache, attachment, cache_id, is_given_up)

    def on_cache_lost(self, attachment: Attachment, cache_id: int, end: AttachmentEnd) -> None:
        """One of several attention workers has gone."""
        self._thread.post(self._lose_cache, attachment, cache_id, end)

    def on_answer(self, attachment: Attachment, answer: SequenceOpened | PlanAccepted) -> None:
        self._thread.post(self._handle_answer, attachment, answer)

    def _work(self) -> float:
        now_s = time.monotonic()  # all that has come before has been handled; what comes during the step has not
        has_worked = not self._session.has_ended and self._step()
        self._check_deadlines(now_s)  # behind the step, which somebody waits for
        if has_worked:
            return 0.0
        if not self._is_idle():
            return IDLE_POLL_S
        collect_young()
        if self._rehearsal is not None:
            self._rehearsal.prepare()
        return 0.0 if self._runner.capture_ahead() else IDLE_POLL_S

    def _is_idle(self) -> bool:
        """Whether nobody waits for this thread, which may become busy for some time."""
        scheduler, session = self._scheduler, self._session
        num_sequences = scheduler.num_waiting + scheduler.num_opening + scheduler.num_running
        return not (session.has_ended or session.is_leaving or num_sequences)

    def _step(self) -> bool:
        """Publishes the next plans and completes the oldest step. Returns whether there was any work."""
        session = self._session
        step = next(iter(session.in_flight), None)
        try:
            self._admit()
            has_begun = self._begin_idle_lanes()
            if step is not None:
                self._plan_ahead(step)
            self._publish_openings()
            if step is not None:
                self._complete(step)
        except PeerError as error:
            self._give_up(AttachmentEnd(str(error), is_crash=True))
            return True
        if session.is_leaving and not session.in_flight:
            self._give_up(AttachmentEnd("another dense worker takes over", is_crash=False))
        return has_begun or step is not None

    def _complete(self, step: ScheduledStep) -> None:
        """Waits for a step's tokens, appends them to their sequences, and reports them."""
        self._report_start(step)
        result = self._collect(step)
        try:
            self._begin_next(step)
        finally:  # the tokens of this step are there, whatever ends the next one
            report = self._update(step, result)
            self._report(step, report)

    def _plan_ahead(self, step: ScheduledStep) -> None:
        """Publishes the plan after a running step of the same lane, as late as the attention worker has it in time."""
        step.waited_before_s, has_waited = self._session.channel_of(step).waited_s, False
        if not step.running.runs_when_collected:
            has_waited = self._await_calls(step)
        elif self._session.last_step_s >= _LONG_STEP_S:
            step.running.run_most()
            while self._make_some_calls(0.0):  # those that have come meanwhile
                pass
        else:
            step.running.run_first()  # attention computes the second layer while this plans
        if (following := self._schedule(step.plan.lane)) is not None:
            self._publish(following)
            self._timing.note(was_late=has_waited and step.running.is_done())

    def _begin_next(self, step: ScheduledStep) -> None:
        """Begins the step after one that has ended, so that attention computes the first layer during the report.

        Not a step that may take much longer than the last one, nor one that hands over extra rows before its layers:
        the report would wait.
        """
        following = next((each for each in self._session.in_flight if each is not step), None)
        if following is None or not following.running.runs_when_collected:
            return
        plan = following.plan
        is_larger = bool(plan.extra_rows) or plan.num_tokens > step.plan.num_tokens
        if not is_larger and self._session.last_step_s < _LONG_STEP_S:
            following.running.begin()

    def _admit(self) -> None:
        """Chooses the sequences to open next; the next plan opens them."""
        session = self._session
        if session.draining:
            for cache_id in self._scheduler.empty_caches():
                if not self._keep_if_needed(cache_id):
                    self._attention.release(session.attachment, cache_id)
        if session.is_leaving or self._drains or not (admitted := self._scheduler.next_to_open()):
            return
        if self._has_run_suspect:
            # The token that cleared it must get away: if what runs next ends the process before that, the gateway will
            # take the suspect for the cause.
            self._has_run_suspect = False
            time.sleep(AFTER_SUSPECT_S)
        for each in admitted:
            if each.status is SequenceStatus.RUNNING:  # a later plan forks it, or the next one opens and runs it
                self._runner.open(each.describe_to_runner())
        # Tells the gateways now, so that they know it before any step runs these sequences.
        self._deliver(StepReport(0, admitted=admitted))

    def _make_some_calls(self, timeout_s: float) -> bool:
        """Makes the next call, and those that have come with it, and then chooses the sequences to open.

        Returns whether there was any. To choose them takes milliseconds if hundreds of clients wait, and thousands of
        calls may come at once. Raises as `_make_call`.
        """
        if not self._make_call(timeout_s):
            return False
        end_s = time.monotonic() + _CALLS_S
        while time.monotonic() < end_s and self._make_call(0.0):
            pass
        self._admit()
        return True

    def _await_calls(self, step: ScheduledStep) -> bool:
        """Makes the calls that come while a GPU runs the step, until the next plan must leave.

        Returns whether it has waited for that.
        """
        num_tokens, begin_s, has_waited = step.plan.num_tokens, self._session.begin_of(step), False
        while not step.running.is_done():
            step.running.sample(waits=False)
            leaves_s = self._timing.leaves_at(num_tokens, begin_s, is_quick=self._session.has_few_streams)
            if (left_s := leaves_s - time.monotonic()) <= 0.0:
                break
            has_waited = True
            self._publish_openings()  # the plan that waits has only sequences that are open by then
            self._make_some_calls(min(left_s, _LOOK_S))
        return has_waited

    def _begin_idle_lanes(self) -> bool:
        """Publishes a plan for each lane in which no step is under way. Returns whether there was any."""
        session = self._session
        if (move := session.dealer.end_move(session.rows)) is not None:
            sequence, lane = move
            self._runner.move(sequence.describe_to_runner(), lane)
        session.dealer.begin_move(session.rows)
        has_begun, busy = False, {step.plan.lane for step in session.in_flight}
        for lane in range(len(session.lanes)):
            if lane not in busy and (step := self._schedule(lane)) is not None:
                self._publish(step)
                has_begun = True
        return has_begun

    def _schedule(self, lane: int) -> ScheduledStep | None:
        """The next step of a lane; None if there is none yet."""
        session = self._session
        if session.is_leaving:
            return None
        if session.in_flight and self._scheduler.waits_for(session.in_flight[-1]):
            return None
        return self._scheduler.schedule(lane)

    def _publish(self, step: ScheduledStep) -> None:
        """Sends the plan to the attention worker and launches the step on the channel of its lane."""
        step.launch_start_s = time.monotonic()
        self._attention.publish(self._session.attachment, step.plan)
        step.running = self._runner.launch(step.plan, self._session.channel_of(step))
        step.launch_s = time.monotonic() - step.launch_start_s

    def _publish_openings(self) -> None:
        """Sends openings that are in no plan yet, since the next one waits: this plan runs nothing."""
        if (plan := self._scheduler.plan_openings()) is not None:
            self._attention.publish(self._session.attachment, plan)

    def _report_start(self, step: ScheduledStep) -> None:
        """Tells the gateways whose first step is about to end on a GPU.

        Their first tokens then come by code and threads that have just run, which takes a third to half as long.
        """
        if step.running.runs_when_collected or not step.entries or step.running.is_done():
            return
        step.started = step_report.record_started(step.sequences, self._session.begin_of(step))
        if step.started:
            self._deliver(StepReport(step.plan.step_id, step.started))

    def _collect(self, step: ScheduledStep) -> StepResult:
        """The result of a step, once the attention worker has reported its errors, too.

        Calls that come meanwhile are made. Raises `PeerError` after the timeout, or when the session has ended.
        """
        session = self._session
        channel, plan, timeout_s = session.channel_of(step), step.plan, self._result_timeout_s
        deadline = time.monotonic() + timeout_s
        step.running.sample(waits=True)
        poll_s = _POLL_S if len(session.in_flight) == 1 else _AHEAD_POLL_S
        while not step.running.is_done():
            if self._make_some_calls(poll_s):
                self._publish_openings()
            if time.monotonic() > deadline:  # however much comes
                raise PeerError(f"step {plan.step_id} has not ended after {timeout_s} s")
        result = step.running.collect()
        deadline = time.monotonic() + timeout_s
        for cache_id in channel.lost_caches:
            self._lose_cache(session.attachment, cache_id, AttachmentEnd("it went away in a step", is_crash=True))
        if session.has_ended:
            raise PeerError("all attention workers went away")
        while session.errors_of(plan.lane) != channel.num_errors:  # they say whose rows have no meaning
            left_s = deadline - time.monotonic()
            if left_s <= 0.0 or not self._make_call(left_s):
                raise PeerError(f"errors up to step {plan.step_id} are not here after {timeout_s} s")
        if step.waited_before_s is not None:
            step.wait_s = channel.waited_s - step.waited_before_s
        step.end_s = time.monotonic()
        return result

    def _make_call(self, timeout_s: float) -> bool:
        has_come = self._thread.make_call(timeout_s)
        if self._session.has_ended:
            raise PeerError("the attention worker went away")
        return has_come

    def _update(self, step: ScheduledStep, result: StepResult) -> StepReport:
        """Appends the step's tokens to their sequences."""
        sequences = step.sequences
        self._has_run_suspect |= bool(sequences) and sequences[0].is_suspect  # it runs alone
        started = step_report.record_started(sequences, self._session.begin_of(step))
        reports = step_report.record_reports(sequences, result.reports)
        outputs = self._scheduler.update(step, result)
        self._timing.add(step.plan.num_tokens, self._session.last_step_s)
        step.follow_up_s = result.follow_up_s
        step_report.record_first_tokens(outputs.others, step.end_s)
        return StepReport(step.plan.step_id, started, outputs, result.logprobs, reports)

    def _report(self, step: ScheduledStep, report: StepReport) -> None:
        """Delivers the step's report to the gateways, then its figures to the observers.

        If no step is under way, as the next one had to wait for this one's tokens, that is published first: the device
        waits for it, and the event loop has much to do with a report.
        """
        stats, others = _describe_step(step, self._scheduler, report.outputs.num_tokens), report.outputs.others
        started = [*step.started, *report.started]
        self._scheduler.drafting.on_step(stats, started, others)
        try:
            if self._session.running and not self._session.in_flight and not self._has_run_suspect:
                self._begin_idle_lanes()
        finally:
            if report.started or report.outputs or report.reports:
                self._deliver(report)
            for observer in self._observers:
                observer.on_step(stats, started, others)

    def _deliver_outputs(self, outputs: SequenceOf[SequenceOutput]) -> None:
        """Delivers what comes between steps, if there is anything."""
        if outputs:
            self._deliver(StepReport.between_steps(outputs))

    def _check_deadlines(self, now_s: float) -> None:
        """Checks the deadlines of waiting sequences, of unclaimed blocks, and of openings without an answer."""
        self._deliver_outputs(self._scheduler.expire(now_s))
        session = self._session
        if session.has_ended:
            return
        if session.ends_claims(now_s):
            self._scheduler.close_orphans()
        try:
            session.check_openings(now_s, self._result_timeout_s * (1 + _STEPS_BEFORE_OPENING))
        except PeerError as error:
            self._give_up(AttachmentEnd(str(error), is_crash=True))

    def _give_up(self, end: AttachmentEnd) -> None:
        attachment = self._session.attachment
        self._attention.drop(attachment, end)
        self._detach(attachment, end)

    def _leave(self) -> None:
        self._session.is_leaving = True

    def _expect(self) -> None:
        session, rehearsal = self._session, self._rehearsal
        if rehearsal is None or session.in_flight or not self._may_rehearse():
            return
        self._rehearsed_s = time.monotonic()
        self._attention.publish(session.attachment, StepPlan(0))  # an empty one: it gets ready, too
        rehearsal.run()

    def _may_rehearse(self) -> bool:
        """Whether nobody has a sequence, and the last rehearsal is some time ago. May be called from any thread."""
        return self._is_idle() and time.monotonic() >= self._rehearsed_s + _REHEARSAL_PAUSE_S

    def _add(self, sequence: Sequence) -> None:
        try:
            self._scheduler.add(sequence)
        except TwostrokeError as error:
            self._deliver_outputs([SequenceOutput.failed(sequence, error)])
            return
        if self._rehearsal is not None:
            self._rehearsal.note(sequence)
        if not self._session.has_ended:
            for cache_id in self._session.draining:
                self._keep_if_needed(cache_id, sequence)

    def _cancel(self, seq_id: int) -> None:
        self._scheduler.cancel(seq_id)

    def _handle_event(self, event: Event) -> None:
        self._deliver_outputs(self._scheduler.handle(event))

    def _attach(self, attachment: Attachment) -> None:
        try:
            self._runner.attach(attachment.channels.values(), attachment.ranks)
        except PeerError as error:  # another rank has gone while graphs were captured with it
            log.warning("not attached", epoch=f"{attachment.epoch:016x}", reason=str(error))
            self._attention.drop(attachment, AttachmentEnd(str(error), is_crash=True))
            attachment.abort()
            attachment.close()
            return
        self._scheduler.begin(attachment)  # the watchdog watches from now on; attaching takes long on a GPU
        self._rehearsal = Rehearsal(self._scheduler.limits, attachment) if attachment.rehearses else None
        log.info("attached", epoch=f"{attachment.epoch:016x}", num_blocks=attachment.caches[0].num_blocks)
        self._attention.ready(attachment)

    def _detach(self, attachment: Attachment, end: AttachmentEnd) -> None:
        if self._is_present(attachment):
            self._session.has_ended, self._rehearsal = True, None
            attachment.abort()  # lets launched steps run through
            attachment.close()  # at once, because the next attachment may need the memory
            for observer in (*self._observers, self._scheduler.drafting):
                observer.on_handoff_abort()
            log.debug("attachment given up", reason=end.reason)

    def _is_present(self, attachment: Attachment) -> bool:
        """Whether it has not ended."""
        return self._session.attachment is attachment and not self._session.has_ended

    def _add_cache(
        self,
        attachment: Attachment,
        cache: AttachedCache,
        add_seam: Callable[[], None],
        drop_seam: Callable[[], None],
    ) -> None:
        if not self._is_present(attachment):
            drop_seam()
            return
        add_seam()
        self._scheduler.add_cache(cache)
        log.info("one more attention worker", cache_id=cache.cache_id, num_blocks=cache.num_blocks)

    def _give_up_cache(self, attachment: Attachment, cache_id: int, is_given_up: bool) -> None:
        if self._is_present(attachment) and cache_id in self._session.ledgers:
            self._scheduler.give_up_cache(cache_id, is_given_up)
            if is_given_up:
                self._keep_if_needed(cache_id)

    def _keep_if_needed(self, cache_id: int, new: Sequence | None = None) -> bool:
        """Whether a KV cache that is given up must stay after all, which whoever gave it up is told.

        With `new`: whether it must for this sequence, which has just been added.
        """
        if (reason := self._scheduler.why_needed(new)) is not None:
            self._attention.keep(self._session.attachment, cache_id, reason)
        return reason is not None

    def _lose_cache(self, attachment: Attachment, cache_id: int, end: AttachmentEnd) -> None:
        """Known already if a step found it first."""
        ledgers = self._session.ledgers
        if not self._is_present(attachment) or cache_id not in ledgers:
            return
        if len(ledgers) == 1:
            self._give_up(end)
            return
        outputs = self._scheduler.lose_cache(cache_id, is_crash=end.is_crash)
        self._attention.forget(attachment, cache_id)
        (log.warning if end.is_crash else log.info)("one attention worker less", cache_id=cache_id, reason=end.reason)
        self._deliver_outputs(outputs)

    def _handle_answer(self, attachment: Attachment, answer: SequenceOpened | PlanAccepted) -> None:
        if not self._is_present(attachment):
            return
        try:
            if isinstance(answer, PlanAccepted):
                outputs = self._scheduler.accepted(answer)
            elif answer.cache_id in self._session.ledgers:
                outputs = self._opened(answer)
            else:  # its worker is known to be gone
                outputs = []
        except PeerError as error:
            self._give_up(AttachmentEnd(str(error), is_crash=True))
            return
        self._deliver_outputs(outputs)

    def _opened(self, answer: SequenceOpened) -> list[SequenceOutput]:
        opening = self._session.openings.get(answer.seq_id)
        output = self._scheduler.opened(answer)
        if answer.error is None and opening is not None:
            self._runner.open(opening.state)
            log.debug("opened", request_id=opening.new.request_id, num_cached_tokens=answer.num_cached_tokens)
        return [] if output is None else [output]


def _describe_step(step: ScheduledStep, scheduler: Scheduler, num_output_tokens: int) -> StepStats:
    """The figures of a step that has just run, and from which sequences got so many tokens."""
    plan, ledgers = step.plan, scheduler.session.ledgers.values()
    blocks = [(each.num_blocks, each.num_free_blocks, each.num_reserved_blocks) for each in ledgers]
    num_blocks, num_free_blocks, num_reserved_blocks = map(sum, zip(*blocks, strict=True))
    return StepStats(
        step_id=plan.step_id,
        num_seqs=len(plan.entries),
        num_tokens=plan.num_tokens,
        num_sampled=int(np.add.reduce(plan.entries.num_logits)),
        num_output_tokens=num_output_tokens,
        num_running=scheduler.num_running,
        num_waiting=scheduler.num_waiting,
        num_preemptions=scheduler.num_preemptions,
        num_blocks=num_blocks,
        num_free_blocks=num_free_blocks,
        num_reserved_blocks=num_reserved_blocks,
        gap_s=step.gap_s,
        launch_s=step.launch_s,
        duration_s=step.end_s - step.begin_s,
        wait_s=step.wait_s,
        follow_up_s=step.follow_up_s,
        lane=plan.lane,
    )


def progress_of(session: Session, counts: EngineCounts, num_layers: int) -> Progress | None:
    """The progress of the oldest step in flight, or None without work."""
    num_waits = [channel.num_waits or 0 for channel in session.attachment.channels.values()]
    counter = (session.attachment.attachment_id, counts.num_steps, session.num_completed, *num_waits)
    oldest = next(iter(session.in_flight), None)
    if oldest is not None:
        plan, channel = oldest.plan, session.channel_of(oldest)
        return Progress(
            counter,
            step_id=plan.step_id,
            layer=None if channel.num_waits is None else channel.num_waits % num_layers,
            request_ids=tuple(session.request_ids.get(each, f"{each:x}") for each in plan.entries.seq_ids.tolist()),
            waits_for="attn_worker" if channel.is_waiting else "",
        )
    # Between two steps the engine waits for an answer, or for blocks that other gateways may still claim. What waits
    # for an attention worker that is missing is refused in time; a dense worker that starts again would not help it.
    waits = counts.num_waiting and session.claim_deadline_s is None and not session.awaits_caches
    if counts.num_running or counts.num_opening or waits:
        return Progress(counter, waits_for="attn_worker")
    return None


# Before the end of the running step: a plan takes about 1.5 ms to the first kernel of the attention worker, and steps
# of one size do not all take the same time.
LEAD_S = 0.002
# The part of that for a plan of a few streams alone that goes by a link: the attention worker has launched it after
# 0.9 ms, 1.3 in one of twenty. Who comes between the two moments makes the plan leave at once, with its prompt.
QUICK = 0.6
_MOST_LEAD_S = 0.02
_MORE, _LESS = 1.5, 0.99  # after a plan that came too late, and after each one in time
_NUM_KEPT = 3  # steps of a size whose durations count


class PlanTiming:
    """When the plan after a running step leaves, on a GPU: as late as both workers still have it in time.

    Predicts that a step takes as long as the fastest of the last ones with about as many tokens. For one thread.

    `lead_s`: how long before the predicted end a plan leaves.
    """

    def __init__(self) -> None:
        self.lead_s = LEAD_S
        self._durations = defaultdict[int, deque[float]](lambda: deque(maxlen=_NUM_KEPT))

    def add(self, num_tokens: int, duration_s: float) -> None:
        """A step has taken so long."""
        self._durations[_size_of(num_tokens)].append(duration_s)

    def leaves_at(self, num_tokens: int, begin_s: float, *, is_quick: bool = False) -> float:
        """When the plan after a step leaves that began at `begin_s`: at once if no step like it is known.

        `is_quick`: the plan is of a few streams alone, and goes by a link.
        """
        durations = self._durations.get(_size_of(num_tokens))
        lead_s = QUICK * self.lead_s if is_quick else self.lead_s
        return begin_s + min(durations) - lead_s if durations else begin_s

    def note(self, *, was_late: bool) -> None:
        """Whether a step ended before the plan that had waited for its end. Then the next ones wait less long.

        A plan that has not waited is in time, so that plans wait again after some that were late.
        """
        self.lead_s = min(self.lead_s * _MORE, _MOST_LEAD_S) if was_late else max(self.lead_s * _LESS, LEAD_S)


def _size_of(num_tokens: int) -> int:
    """The same for numbers that differ by less than an eighth."""
    shift = max(num_tokens.bit_length() - 4, 0)
    return num_tokens >> shift << shift
