"""`Scheduler`: decides which sequences advance by how many tokens. No torch, no gRPC, no asyncio; one engine thread.

There is no prefill or decode phase. A sequence has tokens and computed tokens, and a step lets some sequences catch up,
within a token budget; `StepPlanner` decides which ones. A plan is made while the previous step still runs: it needs
that step's lengths, not its tokens. `waiting_queue.py` decides the order of sequences.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from itertools import compress

import numpy as np

from services.common.errors import CapacityError, InvalidRequest, PeerError, RequestAborted, TwostrokeError
from services.dense_worker.engine.attachment import AttachedCache, Attachment
from services.dense_worker.engine.fairness.admission import Admission
from services.dense_worker.engine.limits import SchedulerLimits
from services.dense_worker.engine.moves import Moves
from services.dense_worker.engine.placement import Placement
from services.dense_worker.engine.sequence import FinishReason, Sequence, SequenceOutput, SequenceStatus
from services.dense_worker.engine.session import NO_ATTACHMENT, Opening, ScheduledStep, Session
from services.dense_worker.engine.step_planner import StepPlanner
from services.dense_worker.engine.step_report import NO_DECODED, DecodedTokens, StepOutputs
from services.dense_worker.engine.turns import Turns
from services.dense_worker.engine.waiting_queue import WaitingQueue
from services.dense_worker.features.drafting.drafting import Drafting
from services.dense_worker.features.feature import Event, Feature
from services.dense_worker.features.fork_policy import ForkPolicy
from services.dense_worker.features.row_policy import RowPolicy
from services.step import PlanAccepted, SequenceOpened, StepPlan, StepResult, TokenColumns, spans_of

GATEWAY_SHIFT = 32  # bit position of the gateway's number in a seq_id


class Scheduler:
    """Continuous batching over one attention worker at a time: that of the `session`.

    `guaranteed_no_evict` admits a sequence only if the cache can hold all tokens that it may get. `max_utilization`
    admits it if the cache can hold its present tokens; when blocks run out, the last sequence in order is preempted: it
    is closed and computed again later. Running and waiting sequences share one order that never changes, so the very
    first sequence is never preempted and always advances. With `take_turns` they share the cache, see `Turns`.

    Each plan passes through `schedule`, `accepted` and `update`; the next plan may be scheduled before. Other methods
    may be called at any time.
    """

    def __init__(
        self,
        limits: SchedulerLimits,
        drafting: Drafting | None = None,
        features: SequenceOf[Feature] = (),
        forks: ForkPolicy | None = None,
        placement: Placement | None = None,
    ) -> None:
        self.limits = limits
        self.drafting = drafting or Drafting()
        self.features = features
        self._sequences: dict[int, Sequence] = {}
        self._waiting = WaitingQueue(
            limits.max_num_waiting, limits.max_num_waiting_tokens, limits.priority_ageing_s, limits.head_start_s
        )
        self.session = Session(NO_ATTACHMENT, self._waiting)  # until the first attachment
        self.session.has_ended = True
        self._suspects = _Suspects()
        self._forks = forks or ForkPolicy()
        self._placement = placement or Placement()
        self._had_parked = False  # when features were last asked to provide what sequences lack
        self._awaits_caches_until_s: float | None = None  # on the monotonic clock
        self._prefix_generation = 0  # of the sequences that are opened next
        self._begin_parts()

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_opening(self) -> int:
        """Number of sequences being opened, cancelled ones included."""
        return len(self.session.openings)

    @property
    def num_running(self) -> int:
        return len(self.session.running)

    @property
    def num_steps(self) -> int:
        """Total number of plans."""
        return self.session.last_step_id

    @property
    def num_preemptions(self) -> int:
        """Total number of preemptions."""
        return self.session.num_preemptions

    def begin(self, attachment: Attachment) -> Session:
        """Starts a new attachment: all live sequences wait again, in their order.

        Plans in flight are void. Their tokens were never known; sampling gives the same ones again.
        """
        old = self.session
        for sequence in {*[each.sequence for each in old.openings.values()], *old.running}:
            old.release_features(sequence)  # of a cancelled one, too, that is still being opened
        self.session = session = Session(attachment, self._waiting, old.last_step_id, old.num_preemptions)
        for cache in attachment.caches:
            self._prefix_generation = max(self._prefix_generation, cache.prefix_generation)
        self._begin_parts()
        self._await_caches(attachment.max_model_len // attachment.block_size)
        self._waiting.clear()
        for sequence in self._sequences.values():
            sequence.leave_cache()
            sequence.num_pending_tokens = 0
            self._note_new_caches(sequence)
            session.wait(sequence)
        return session

    # From a sequence's arrival to its end

    def add(self, sequence: Sequence) -> None:
        """Queues a sequence. Raises `InvalidRequest` or `CapacityError` if it can never run or the queue is full."""
        if sequence.seq_id in self._sequences:
            raise InvalidRequest(f"sequence {sequence.seq_id:#x} is already open")
        num_tokens = sequence.num_prompt_tokens + sequence.spec.max_tokens
        if num_tokens > self.limits.max_model_len:
            raise InvalidRequest(
                f"prompt has {sequence.num_prompt_tokens} tokens and max_tokens is {sequence.spec.max_tokens}, "
                f"together {num_tokens}; max_model_len is {self.limits.max_model_len}"
            )
        if sequence.policy is not None:
            sequence.policy.check(self.session.ledger, self.limits)
        if (lack := self._admission.lack_of(sequence, self.session.ledgers, awaits=True)) is not None:
            raise CapacityError(f"{num_tokens} tokens need {lack.num_blocks} KV cache blocks, {lack.room}")
        self._waiting.admit(sequence)
        self._note_new_caches(sequence)
        self._sequences[sequence.seq_id] = sequence
        self._suspects.add(sequence)
        self._forks.add(sequence)
        self.session.wait(sequence)

    def next_to_open(self) -> list[Sequence]:
        """Chooses the sequences, in order, that fit now. Reserves their blocks and makes them OPENING.

        RUNNING at once are those that will be forked, because nobody has to open them, and those of which the KV cache
        has nothing: the plan that opens them runs them.
        A client that holds less than its share may take places and blocks from others: then sequences are preempted.
        Sequences that already hold blocks, from before the attachment, come before others: only they can use these
        blocks, and the others may need the space. Suspects come before all, one at a time.
        """
        session, chosen = self.session, list[Sequence]()
        if session.draining:
            self._moves.go_on()
        if self._waiting.has_parked or self._had_parked:  # once more, so that nothing goes on for those that have gone
            self._had_parked, session.has_provided = self._waiting.has_parked, True
            oldest_step_id = session.in_flight[0].plan.step_id if session.in_flight else None
            for feature in self.features:
                for sequence in feature.provide(self._waiting, oldest_step_id):
                    self._admission.forget(sequence)
            if self._turns is not None:  # who lacks something keeps no blocks from those for whom it had to go
                for sequence in self._waiting.parked():
                    self._turns.forget(sequence)
        if self._suspects.active() is not None:
            return chosen
        if self._turns is not None:
            admission = self._admission
            self._turns.go_on(admission.most_blocks, admission.blocks_to_reserve, admission.num_places)
        while (sequence := self._admission.next_to_open(self._next_suspect())) is not None:
            self._waiting.choose(sequence)
            if self._turns is not None:
                self._turns.begin(sequence, self._admission.most_blocks(sequence))
            for feature in sequence.features:
                feature.enter()
            is_forked = self._forks.takes(sequence, session)
            is_held = is_forked or sequence.seq_id in session.orphaned_blocks
            sequence.num_reserved_blocks = self._admission.blocks_to_reserve(sequence, None if is_held else 0)
            session.ledger_of(sequence).reserve(sequence.num_reserved_blocks)
            chosen.append(sequence)
            if is_forked:
                self._waiting.note_opened(sequence)
                session.enter(sequence)
                continue
            if self._starts_empty(sequence):
                self._start_empty(sequence)
                continue
            sequence.status = SequenceStatus.OPENING
            state = sequence.describe_to_runner()
            news = sequence.describe_to_caches(self._prefix_generation)
            session.begin_opening(Opening(sequence, news[0], state, time.monotonic()))
            session.to_open += news
            if sequence.is_suspect:
                break
        if not (session.running or session.openings or session.closing or self._waiting.has_parked):
            session.drop_orphaned_blocks()  # nothing else can free blocks
        return chosen

    def _starts_empty(self, sequence: Sequence) -> bool:
        """Whether it is known that a KV cache has nothing of a sequence, so that no step has to wait for the answer.

        Not for suspects, nor before any step has completed: a sequence that ends the process with its first step has
        to be told to its gateway before, for which the answer leaves time.
        """
        session = self.session
        return not (
            sequence.is_suspect
            or not session.num_completed
            or session.prefixes.may_have(sequence)
            or session.attachment.ranks is not None  # their caches may differ
            or sequence.divided is not None
            or sequence.seq_id in session.orphaned_blocks
            or any([each.num_extra_rows for each in sequence.features])
        )

    def _start_empty(self, sequence: Sequence) -> None:
        """Lets the first plan that runs a sequence open it."""
        self.session.starting[sequence.seq_id] = sequence.describe(self._prefix_generation, starts_empty=True)
        sequence.note_found(0)
        self._waiting.note_opened(sequence)
        self.session.enter(sequence)
        for feature in sequence.features:
            feature.opened(sequence, SequenceOpened(sequence.seq_id))

    def opened(self, answer: SequenceOpened) -> SequenceOutput | None:
        """Handles the answer to an opening. Returns the error output of a refused sequence that was not cancelled.

        Raises `PeerError` if the sequence was not being opened.
        """
        session = self.session
        opening = session.end_opening(answer.seq_id)
        if opening is None:
            if answer.seq_id in session.closing:
                return None  # another one of its KV caches was lost meanwhile, or it has ended
            sequence = self._sequences.get(answer.seq_id)
            if answer.error is not None and sequence is not None and sequence.status is SequenceStatus.RUNNING:
                return self._fail(sequence, RequestAborted(answer.error))  # it was to start empty; its steps fail, too
            raise PeerError(f"sequence {answer.seq_id:x} is not being opened")
        sequence = opening.sequence
        session.release_reservation(sequence)
        if answer.error is not None:
            return self._refused(sequence, answer.error)
        ledger = session.ledger_of(sequence)
        session.orphaned_blocks.pop(sequence.seq_id, None)
        ledger.give_back(answer.num_freed_blocks)
        ledger.take(answer.num_pinned_blocks)  # may include blocks that it has just freed
        num_missing = self._admission.blocks_to_reserve(sequence, answer.num_held_blocks)
        sequence.num_reserved_blocks = min(num_missing, ledger.num_available_blocks)
        ledger.reserve(sequence.num_reserved_blocks)
        sequence.num_blocks = answer.num_held_blocks
        num_evicted = ledger.blocks_for(answer.num_cached_tokens) - answer.num_held_blocks
        sequence.num_evicted_blocks = 0 if sequence.divided is not None else num_evicted
        sequence.num_computed_tokens = sequence.num_opened_tokens = answer.num_cached_tokens
        sequence.note_found(answer.num_cached_tokens - answer.num_recovered_tokens)
        self._waiting.note_opened(sequence)
        if sequence.status is SequenceStatus.FINISHED:  # cancelled meanwhile
            session.close(sequence)
        else:
            session.enter(sequence)
            opening.state.lane = sequence.lane
            if not all([feature.opened(sequence, answer) for feature in sequence.features]):
                session.preempt(sequence)
        return None

    def _refused(self, sequence: Sequence, error: str) -> SequenceOutput | None:
        self.session.closing.discard(sequence.seq_id)
        self.session.release_features(sequence)
        if sequence.status is SequenceStatus.FINISHED:
            return None
        self._forget(sequence)
        return SequenceOutput.failed(sequence, RequestAborted(error))

    def waits_for(self, step: ScheduledStep) -> bool:
        """Decides whether the next step is planned only when this one, the newest under way, has ended.

        Called once for each step, after it has been launched and before it is collected.
        """
        session, num_running = self.session, len(self.session.running)
        most = self.limits.max_num_seqs - num_running
        if self.drafting.begins_to_look(num_running, most):
            for sequence in [each for each in session.running if each.slot is not None]:
                if self.drafting.looks_at(sequence):
                    session.leave_row(sequence)
        if session.to_fork:  # forks come first, before the sequence from which they are can end
            most = 0
        return self.drafting.waits_for(step.running, session.others, len(session.rows), most)

    def schedule(self, lane: int = 0) -> ScheduledStep | None:
        """Plans the next step of a lane; None if there is no work. A plan without entries only closes sequences.

        The step is in flight from now on: it is to be published, and then updated.
        """
        session, suspect = self.session, self._suspects.active()
        if suspect is not None and any([step.plan.lane != lane for step in session.in_flight]):
            return None  # no step of another lane runs beside its own
        builder = self._planners[lane].plan_step(suspect)
        return None if builder is None else session.schedule(builder, lane)

    def plan_openings(self) -> StepPlan | None:
        """The openings of the next step alone, which are sent ahead of it; None: there are none that have an answer."""
        session = self.session
        if not session.to_open:
            return None
        return StepPlan(session.last_step_id + 1, new_sequences=session.take_openings())

    def accepted(self, answer: PlanAccepted) -> list[SequenceOutput]:
        """Handles the attention worker's answer to a plan: freed blocks, and sequences that could not take part."""
        session, errors = self.session, answer.errors or {}
        if (step := session.accept(answer)) is None:
            return []
        if session.num_running_rows > len(session.running):
            self._admission.reserve_for_rows()
        outputs = []
        if step.plan.evicts_blocks:
            for sequence, _, has_evicted in step.entries:
                if has_evicted and sequence.status is SequenceStatus.RUNNING:
                    self._admission.reserve_again(sequence)
        for seq_id, error in errors.items():
            for sequence, num_taken_blocks in step.taken_blocks(seq_id):
                if sequence in step.lost or answer.cache_id not in session.ledgers:  # that worker is lost
                    continue
                session.ledgers[answer.cache_id].give_back(num_taken_blocks)
                if sequence.status is not SequenceStatus.FINISHED:
                    outputs.append(self._fail(sequence, RequestAborted(error)))
        return outputs

    def update(self, step: ScheduledStep, result: StepResult) -> StepOutputs:
        """The oldest step in flight has ended: appends its tokens; its sequences continue or end."""
        self.session.complete(step)
        outputs: list[SequenceOutput] = []
        sampled: list[tuple[int, int]] = []  # of sequences without a row
        decoded = self._append_rows(step, result, outputs, sampled)
        previous = None  # the sequence of the entry before, which has several if it has a row policy
        rows = result.token_ids.rows(len(step.decodes.positions)) if step.entries else ()
        for (sequence, _, _), token_ids in zip(step.entries, rows, strict=True):
            if token_ids and sequence is not previous:
                output = None
                if sequence in step.lost:
                    self._ignore(sequence)
                elif sequence.policy is None:
                    output = self._append(sequence, token_ids, result, sampled)
                else:
                    output = self._advance(sequence, sequence.policy, result)
                if output is not None:
                    outputs.append(output)
            previous = sequence
        if sampled:
            self.session.sampled.append(TokenColumns.of(sampled))
        return StepOutputs(decoded, outputs)

    def _append_rows(
        self,
        step: ScheduledStep,
        result: StepResult,
        outputs: list[SequenceOutput],
        sampled: list[tuple[int, int]],
    ) -> DecodedTokens:
        """Appends the tokens of a step's rows, and returns those of rows that go on. The others become `outputs`."""
        planned, rows = step.decodes.rows, self.session.rows
        num_rows = len(planned.slots)
        if not num_rows:
            return NO_DECODED
        token_ids = result.token_ids.token_ids[:num_rows]
        tokens = token_ids.tolist()
        decoded = DecodedTokens(planned.streams, planned.seq_ids, token_ids, planned.sequences)
        may_end = rows.may_end(planned, token_ids, tokens)
        if result.ended:
            may_end |= np.isin(planned.seq_ids, np.array(list(result.ended), np.uint64))
        if not np.count_nonzero(may_end):
            rows.append(planned.slots, planned.outputs, tokens)
        else:
            for index in np.flatnonzero(may_end).tolist():
                sequence = planned.sequences[index]
                if sequence in step.lost:
                    self._ignore(sequence)
                elif (output := self._append(sequence, (tokens[index],), result, sampled)) is not None:
                    outputs.append(output)
            goes_on = ~may_end
            decoded = DecodedTokens(*(column[goes_on] for column in decoded))
            rows.append(planned.slots[goes_on], compress(planned.outputs, goes_on.tolist()), decoded.token_ids.tolist())
        if len(decoded.token_ids):
            self.session.sampled.append(TokenColumns(decoded.seq_ids, decoded.token_ids))
        return decoded

    def _append(
        self,
        sequence: Sequence,
        token_ids: SequenceOf[int],
        result: StepResult,
        sampled: list[tuple[int, int]],
    ) -> SequenceOutput | None:
        """Appends the tokens of one sequence, and adds those that are known now to `sampled`."""
        has_row = sequence.slot is not None  # since then it may have left it, or got one
        if has_row:
            self.session.rows.append_one(sequence)
        else:
            sequence.num_pending_tokens -= 1
        num_draft_tokens, sequence.num_draft_tokens = sequence.num_draft_tokens, 0
        if sequence.status is SequenceStatus.FINISHED:
            return None  # ended by an earlier step, or cancelled: this step was wasted
        if error := result.ended.get(sequence.seq_id):
            return self._fail(sequence, error)
        if num_draft_tokens:
            self.drafting.counts.add(num_draft_tokens, len(token_ids) - 1)
        first = len(sequence.output_token_ids)
        finish_reason = sequence.append(token_ids, is_complete=sequence.seq_id in result.ended)
        self._suspects.clear(sequence)
        if finish_reason is not None:
            self._finish(sequence)
            return SequenceOutput(sequence, sequence.output_token_ids[first:], finish_reason)
        if sequence.status is SequenceStatus.RUNNING:
            sampled += [(sequence.seq_id, token_id) for token_id in token_ids]
            if not has_row:
                sequence.num_computed_tokens += len(token_ids) - 1  # the accepted drafts
                if self._has_rows and sequence.is_plain and not self.drafting.looks_at(sequence):
                    self.session.enter_row(sequence)
        return SequenceOutput(sequence, token_ids, None)

    def _advance(self, sequence: Sequence, policy: RowPolicy, result: StepResult) -> SequenceOutput | None:
        """Lets a row policy choose how the rows of its sequence go on."""
        sequence.num_pending_tokens -= 1
        if sequence.status is not SequenceStatus.RUNNING:
            return None  # it has ended, or has left the cache: the same rows are computed again
        advanced = policy.advance(result.logprobs)
        self._suspects.clear(sequence)
        sequence.output_token_ids[:] = advanced.output_token_ids
        if advanced.is_done:
            self._finish(sequence)
        else:
            self.session.lanes[sequence.lane].dead_rows += advanced.dead_seq_ids
        finish_reason = FinishReason.STOP if advanced.is_done else None
        return SequenceOutput(sequence, (), finish_reason, report=advanced.report)

    def _ignore(self, sequence: Sequence) -> None:
        """Forgets the token that a step in flight had for a sequence which its attention worker has lost."""
        sequence.num_pending_tokens -= 1

    def cancel(self, seq_id: int) -> None:
        """Forgets a sequence; the next plan closes its blocks. Unknown ids are ignored."""
        sequence = self._sequences.get(seq_id)
        if sequence is not None:
            self._finish(sequence)

    def expire(self, now_s: float) -> list[SequenceOutput]:
        """Ends sequences that have waited too long for their first step; `now_s` is on the monotonic clock."""
        outputs = [self._fail(sequence, error) for sequence, error in self._waiting.expired(now_s)]
        if self._awaits_caches_until_s is not None and now_s > self._awaits_caches_until_s:
            self._awaits_caches_until_s = None
            outputs += self._refuse_too_large()
        return outputs

    def handle(self, event: Event) -> list[SequenceOutput]:
        """Something has happened to the resources of a feature. Ends the sequences that fail because of it."""
        return [self._fail(sequence, error) for sequence, error in list(event(self._waiting))]

    def close_orphans(self, gateway: int | None = None) -> None:
        """Closes sequences of an earlier dense worker that were not submitted again: all, or those of `gateway`."""
        unclaimed = [seq_id for seq_id in self.session.orphaned_blocks if seq_id not in self._sequences]
        self.session.close_orphaned([each for each in unclaimed if gateway in (None, each >> GATEWAY_SHIFT)])

    def forget_prefixes(self, generation: int | None = None) -> int:
        """Sequences that are opened from now on find no blocks of earlier ones; returns their generation of prefixes.

        With a `generation`, only if theirs was lower.
        """
        if generation is None:  # by the clock, so that no attention worker that is not attached now has blocks of it
            generation = max(self._prefix_generation + 1, time.time_ns())
        self._prefix_generation = max(self._prefix_generation, generation)
        return self._prefix_generation

    # KV caches of several attention workers, which come and go

    def add_cache(self, cache: AttachedCache) -> None:
        """One more attention worker has attached, and may have sequences from now on."""
        self.session.add_cache(cache)
        self._prefix_generation = max(self._prefix_generation, cache.prefix_generation)

    def give_up_cache(self, cache_id: int, is_given_up: bool = True) -> None:
        """The sequences of an attention worker move to the others, and no further one is opened there; or do again."""
        (self.session.draining.add if is_given_up else self.session.draining.discard)(cache_id)

    def empty_caches(self) -> list[int]:
        """Those that are given up and have no sequence any more."""
        return [each for each in self.session.draining if self._moves.is_empty(each)]

    def why_needed(self, new: Sequence | None = None) -> str | None:
        """Why the KV caches that are given up must stay: a request that no other one could hold. None: they may go.

        With `new`, which has just been added, only that one is looked at.
        """
        for each in self._sequences.values() if new is None else (new,):
            if (lack := self._admission.lack_of(each, self.session.open_ledgers)) is not None:
                return f"a request needs {lack.num_blocks} KV cache blocks, of those that would be left {lack.room}"
        return None

    def lose_cache(self, cache_id: int, *, is_crash: bool) -> list[SequenceOutput]:
        """An attention worker has gone, and others are left: its sequences wait again, in their order.

        What steps in flight compute of them is void. Ends those that were alone in a step when several workers crashed.
        """
        session, lost = self.session, list[Sequence]()
        if is_crash:
            self._await_caches(sum(each.num_blocks for each in session.ledgers.values()))
        for opening in [each for each in session.openings.values() if cache_id in each.sequence.cache_ids]:
            lost.append(opening.sequence)
            session.end_opening(opening.sequence.seq_id)
            session.closing.discard(opening.sequence.seq_id)
            session.release_reservation(opening.sequence)
            session.close_rest(opening.sequence, cache_id)
            session.release_features(opening.sequence)
        session.to_open = [each for each in session.to_open if each.cache_id != cache_id]
        for sequence in [each for each in session.running if cache_id in each.cache_ids]:
            lost.append(sequence)
            session.leave(sequence)
        if not is_crash:
            self._placement.expect_less(session.ledgers[cache_id].num_blocks)
        session.remove_cache(cache_id)
        self._placement.forget(cache_id)
        outputs = []
        under_way = spans_of(step.plan for step in session.in_flight)
        for step in session.in_flight:
            left = step.left.items()
            step.lost.update(lost, [each for each, where in left if cache_id in where])
        for sequence in lost:
            if sequence.status is SequenceStatus.FINISHED:  # cancelled while it was being opened
                continue
            if is_crash and not under_way.keys().isdisjoint({sequence.seq_id, *sequence.open_seq_ids}):
                if sequence.is_suspect:
                    what = f"{sequence.num_crashes + 1} attention workers died while they computed this request"
                    self._forget(sequence)
                    outputs.append(SequenceOutput.failed(sequence, RequestAborted(what)))
                    continue
                sequence.num_crashes += 1
            session.wait(sequence)
            self._suspects.add(sequence)
        return outputs + self._refuse_too_large()

    def _await_caches(self, num_blocks: int) -> None:
        """For some time, sequences that need KV caches with so many blocks together wait for those that are missing."""
        self._awaits_caches_until_s = time.monotonic() + self.limits.return_timeout_s
        self._placement.expect(num_blocks, self._awaits_caches_until_s)

    def _refuse_too_large(self) -> list[SequenceOutput]:
        """Ends waiting sequences for which no KV cache that is left has room."""
        outputs = list[SequenceOutput]()
        for sequence in list(self._waiting):
            if (lack := self._admission.lack_of(sequence, self.session.ledgers, awaits=True)) is not None:
                error = f"the request needs {lack.num_blocks} KV cache blocks, of those that are left {lack.room}"
                outputs.append(self._fail(sequence, CapacityError(error)))
        return outputs

    # Parts of several of these

    def _begin_parts(self) -> None:
        """Makes the parts that work for one session."""
        session, limits = self.session, self.limits
        self._turns = Turns(session, limits.turn_tokens) if limits.policy == "take_turns" else None
        self._admission = Admission(session, limits, self._forks, self._placement, self._turns)
        self._moves = Moves(session, self._admission)
        parts = (session, limits, self.drafting, self._forks)
        self._planners = [StepPlanner(*parts, lane) for lane in range(len(session.lanes))]
        self._has_rows = session.sliding_window.window is None

    def _note_new_caches(self, sequence: Sequence) -> None:
        if self.session.has_new_caches:
            for feature in sequence.features:
                feature.caches_are_new()

    def _next_suspect(self) -> Sequence | None:
        """The first suspect that can be opened. One that waits for a KV cache to come back blocks nobody."""
        for suspect in self._suspects:
            if suspect.is_ready and self._admission.has_left(suspect) and self._admission.may_have_room(suspect):
                return suspect
        return None

    def _fail(self, sequence: Sequence, error: TwostrokeError) -> SequenceOutput:
        self._finish(sequence)
        return SequenceOutput.failed(sequence, error)

    def _finish(self, sequence: Sequence) -> None:
        if sequence.status is SequenceStatus.RUNNING:
            self.session.leave(sequence)
        elif sequence.status is SequenceStatus.WAITING:
            self._waiting.remove(sequence)
            if sequence.seq_id in self.session.orphaned_blocks:
                self.session.close_orphaned([sequence.seq_id])
        else:
            self.session.closing.add(sequence.seq_id)  # it is being opened, and will be closed then
        self._forget(sequence)

    def _forget(self, sequence: Sequence) -> None:
        """A sequence has ended that is in no KV cache and does not wait."""
        sequence.status = SequenceStatus.FINISHED
        del self._sequences[sequence.seq_id]
        self._suspects.clear(sequence)
        self._forks.remove(sequence)
        self.drafting.finish(sequence)
        self._waiting.forget(sequence)
        self._admission.forget(sequence)
        if self._turns is not None:
            self._turns.forget(sequence)


class _Suspects:
    """Live sequences that were running in several consecutive crashes of a worker, in the order of arrival.

    They run one at a time without other sequences, each until it gets a token. If a worker dies again, the gateway
    knows which sequence was the cause.
    """

    def __init__(self) -> None:
        self._sequences: dict[int, Sequence] = {}  # by seq_id

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences.values())

    def add(self, sequence: Sequence) -> None:
        """Remembers a sequence if it is a suspect."""
        if sequence.is_suspect:
            self._sequences[sequence.seq_id] = sequence

    def clear(self, sequence: Sequence) -> None:
        """Clears a sequence of suspicion: it got a token while the worker lives, or it has ended."""
        if sequence.num_crashes:
            sequence.num_crashes = 0
            self._sequences.pop(sequence.seq_id, None)

    def active(self) -> Sequence | None:
        """The suspect that is OPENING or RUNNING; no other sequence may run meanwhile."""
        if not self._sequences:
            return None
        return next((each for each in self._sequences.values() if each.status is not SequenceStatus.WAITING), None)
