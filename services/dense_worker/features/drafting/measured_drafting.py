"""`MeasuredDrafting`: decides, before each step, which sequences get how many drafts, or whether the step has none.

What the drafts are, a `Drafter` knows: text that is copied, or tokens of heads of the model or of a draft model.

Drafts cost time: their step cannot be planned ahead, and it computes more tokens. What that costs is measured
(`StepCosts`), and so is how often drafts are right (`Acceptance`). A step gets the drafts that promise the least time
per token, as a mean over its sequences: so those that are copied do not make the others much slower. While a step
without drafts promises as little, steps are planned ahead, as without speculation.

What speculation has lost and gained so far is measured as well (`TimeBudget`). When the budget is spent, no text is
looked at, and all steps are planned ahead.

`ForcedDrafting` is that of a server without speculation: steps have the tokens that grammars force, no other drafts.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as SequenceOf
from typing import TYPE_CHECKING

from services.dense_worker.engine.observer import StepStats
from services.dense_worker.engine.plan_builder import PlanBuilder
from services.dense_worker.engine.sequence import Sequence, SequenceOutput, SequenceStatus
from services.dense_worker.engine.session import Session
from services.dense_worker.features.drafting.device_drafter import DraftRequest
from services.dense_worker.features.drafting.drafter import (
    MAX_FORCED,
    Acceptance,
    DevicePredictor,
    Drafter,
    ForcedTokens,
    Predictor,
)
from services.dense_worker.features.drafting.drafting import Drafting
from services.dense_worker.features.drafting.step_costs import StepCosts, TimeBudget

if TYPE_CHECKING:
    from services.dense_worker.runner.model_runner import RunningStep

MAX_TRIAL_STEPS = 64.0  # as many steps' time may be saved for trials, which gains pay
MAX_TRIAL_LOSS_STEPS = 8.0  # that one of them may take: to compute a part of a prompt takes longer than to draft
MAX_LOOK_S = 0.005  # for what is forced, before a step
MIN_GAIN = 1.1  # a token must take so many times less time with drafts: estimates have errors


class MeasuredDrafting(Drafting):
    """Steps have the drafts that make tokens come sooner, by what steps have cost. Runs on the engine thread."""

    def __init__(self, drafter: Drafter, num_drafts: int, costs: StepCosts) -> None:
        """num_drafts: most drafts of a sequence in a step, if they are not forced"""
        super().__init__()
        self._drafter = drafter
        self._num_drafts = num_drafts
        self._costs = costs
        self._predictors: dict[Sequence, Predictor] = {}  # of sequences that may have drafts
        self._forced = Acceptance()  # how many tokens are forced at a time
        self._allotted: dict[int, int] = {}  # number of drafts in the step being planned, by seq_id
        self._has_drafts = False  # whether the newest plan has drafts
        self._budget = TimeBudget()
        self._trials = TimeBudget(MAX_TRIAL_STEPS, MAX_TRIAL_LOSS_STEPS)  # to draft what no step may have
        self._is_held_back = False  # whether the next plan waits for the end of the step under way
        self._was_held_back = False  # whether the oldest plan under way did so
        self._was_busy = False  # whether sequences were running when the last step ended
        self._request: DraftRequest | None = None  # of the step under way, if something is drafted after it
        self._requested_for: SequenceOf[Sequence] = ()  # the sequences that ran when it was made

    def looks_at(self, sequence: Sequence) -> bool:
        """Also those that have no drafts."""
        return True

    def waits_for(
        self, step: RunningStep, running: SequenceOf[Sequence], num_rows: int, max_num_drafts: int
    ) -> bool:
        """Whether a token promises to take less time if the next step is planned later, with drafts.

        Then, and now and then as a trial, the device drafts after the step.
        """
        if self._has_drafts:
            for sequence in running:
                if (predictor := self._predictors.get(sequence)) is not None:
                    predictor.settle()
        self._is_held_back = self._has_drafts or self._promises_gain(running, num_rows, max_num_drafts)
        self._request = self._make_request(running)
        if self._request is not None:
            self._requested_for = tuple(running)
            step.follow_with(self._request)
        return self._is_held_back

    def _promises_gain(self, running: SequenceOf[Sequence], num_rows: int, max_num_drafts: int) -> bool:
        if max_num_drafts <= 0 or self._budget.is_spent:
            return False
        begin_s, decodes = time.thread_time(), []
        for sequence in running:
            num_remaining = sequence.num_remaining_tokens
            if num_remaining > 1:
                return False  # the next step computes a prompt
            if num_remaining == 1:
                decodes.append(sequence)
        num_seqs = num_rows + len(decodes)
        ahead_s = self._costs.cost(num_seqs, is_ahead=True) if decodes else None
        if ahead_s is None:
            return False
        savings = []
        for _, predictor in self._followed(decodes):
            savings += _savings(predictor.next_chances(self._most_of(predictor)))
        savings.sort(reverse=True)
        num_drafts, time_s = self._choose(num_seqs, savings, max_num_drafts, ahead_s, is_careful=False)
        self._budget.spend(time.thread_time() - begin_s)
        return num_drafts > 0 and MIN_GAIN * time_s < ahead_s and not self._budget.is_spent

    def _make_request(self, running: SequenceOf[Sequence]) -> DraftRequest | None:
        """What the device drafts: nothing if no running sequence may use it."""
        if self._drafter.on_device is None:
            return None
        if not self._is_held_back and (self._budget.is_spent or self._trials.is_spent):
            return None
        predictors = [self._predictors[sequence] for sequence in running if sequence in self._predictors]
        return self._drafter.request(predictors, self._is_held_back) if predictors else None

    def _take_requested(self) -> None:
        """Passes on what the device has drafted after the step that has ended."""
        request, self._request = self._request, None
        if request is None:
            return
        for sequence in self._requested_for:
            token_ids = request.token_ids.get(sequence.seq_id)
            if token_ids is None or sequence.status is SequenceStatus.FINISHED:
                continue
            predictor = self._follow(sequence)
            if isinstance(predictor, DevicePredictor):
                predictor.take(token_ids)
        self._requested_for = ()

    def begin_step(self, decodes: SequenceOf[Sequence], num_rows: int, max_num_drafts: int) -> None:
        """Divides the drafts of a step among its sequences."""
        self._has_drafts = False
        self._allotted.clear()
        if self._is_held_back:
            self._is_held_back, self._was_held_back = False, True
        if max_num_drafts <= 0 or self._budget.is_spent or any(sequence.num_pending_tokens for sequence in decodes):
            return
        savings = []
        for sequence, predictor in self._followed(decodes):
            chances = predictor.chances(self._most_of(predictor))
            savings += [(saved, sequence.seq_id) for saved in _savings(chances)]
        savings.sort(key=lambda each: -each[0])
        num_seqs = num_rows + len(decodes)
        ahead_s = self._costs.cost(num_seqs, is_ahead=True) if savings else None
        if ahead_s is None:
            return
        falling = [saved for saved, _ in savings]
        num_drafts, _ = self._choose(num_seqs, falling, max_num_drafts, ahead_s, is_careful=True)
        for _, seq_id in savings[:num_drafts]:
            self._allotted[seq_id] = self._allotted.get(seq_id, 0) + 1

    def propose(self, sequence: Sequence, session: Session, step: PlanBuilder) -> tuple[int, ...]:
        """The drafts of a sequence in the step that is being planned."""
        predictor, num_tokens = self._predictors.get(sequence), self._allotted.get(sequence.seq_id, 0)
        if predictor is None or not num_tokens:
            return ()
        num_tokens = min(num_tokens, room_for_drafts(sequence, session, step))
        drafts = tuple(predictor.draft(num_tokens)) if num_tokens > 0 else ()
        self._has_drafts = self._has_drafts or bool(drafts)
        return drafts

    def finish(self, sequence: Sequence) -> None:
        """Forgets the sequence. The drafter may keep the answer for later ones."""
        self._predictors.pop(sequence, None)
        self._drafter.finish(sequence)

    def on_step(self, stats: StepStats, started: Iterable[Sequence], outputs: Iterable[SequenceOutput]) -> None:
        """Notes what a step has cost, if it only decoded and followed another one without a pause."""
        self._take_requested()
        was_busy, self._was_busy = self._was_busy, stats.num_running > 0
        was_held_back, self._was_held_back = self._was_held_back, False
        if not was_held_back and stats.follow_up_s:
            self._trials.spend(stats.follow_up_s)
        if not (stats.num_seqs and was_busy):
            return
        if stats.num_tokens != stats.num_sampled:  # it computed prompts
            self._budget.spend(stats.gap_s if was_held_back else 0.0)
            return
        is_ahead = stats.gap_s == 0.0
        cost_s = stats.gap_s + stats.duration_s - (stats.follow_up_s if is_ahead else 0.0)
        self._costs.record(stats.num_tokens, cost_s, is_ahead=is_ahead)
        ahead_s = self._costs.cost(stats.num_seqs, is_ahead=True)
        if ahead_s is not None:
            if stats.follow_up_s:
                self._drafter.note_cost(stats.follow_up_s / ahead_s)
            gain_s = 0.0
            if was_held_back:
                usual_s = self._costs.cost(stats.num_tokens, is_ahead=False) or cost_s  # a pause is no fault of drafts
                gain_s = stats.num_output_tokens / stats.num_seqs * ahead_s - usual_s
            self._budget.add_step(ahead_s, gain_s)
            self._trials.add_step(ahead_s, gain_s)

    def on_handoff_abort(self) -> None:
        """The plans under way are void."""
        self._forget_plans()

    def _forget_plans(self) -> None:
        self._has_drafts = self._was_busy = self._is_held_back = self._was_held_back = False
        self._request, self._requested_for = None, ()
        self._allotted.clear()

    def _follow(self, sequence: Sequence) -> Predictor | None:
        """The predictor of a sequence, which knows all of its tokens; None if it may have no drafts."""
        predictor = self._predictors.get(sequence)
        if predictor is None:
            if not may_have_drafts(sequence):
                return None
            forced_by = sequence.forced_by
            if forced_by is None:
                predictor = self._drafter.begin(sequence)
            else:
                predictor = ForcedTokens(forced_by, self._forced.begin())
            self._predictors[sequence] = predictor
        predictor.follow(sequence.output_token_ids)
        return predictor

    def _followed(self, decodes: SequenceOf[Sequence]) -> Iterator[tuple[Sequence, Predictor]]:
        """Those that may have drafts; not all, if it takes long to find what is forced: the rest has none this time."""
        begin_s = time.monotonic()
        for sequence in decodes:
            if (predictor := self._follow(sequence)) is not None:
                yield sequence, predictor
                if isinstance(predictor, ForcedTokens) and time.monotonic() - begin_s > MAX_LOOK_S:
                    return

    def _most_of(self, predictor: Predictor) -> int:
        """Most drafts of a sequence in a step."""
        return MAX_FORCED if isinstance(predictor, ForcedTokens) else self._num_drafts

    def _choose(
        self, num_seqs: int, savings: SequenceOf[float], max_num_drafts: int, ahead_s: float, *, is_careful: bool
    ) -> tuple[int, float]:
        """The number of drafts with the least time per token, and this time, as a mean over the sequences.

        The step is planned after the one before. savings: of the drafts, falling, see `_savings`. A size that has not
        been measured counts as much as the next smaller one, so that it is measured. is_careful: of such sizes only the
        smallest; the larger ones come after it
        """
        cost_s = self._costs.cost(num_seqs, is_ahead=False) or ahead_s
        best = 0, cost_s
        num_steps, num_drafts, limit = float(num_seqs), 0, min(len(savings), max_num_drafts)
        while num_drafts < limit:
            size = self._costs.size_of(num_seqs + num_drafts + 1)
            stop = min(size - num_seqs, limit)  # a step of a size costs the same however full it is
            num_steps -= sum(savings[num_drafts:stop])
            num_drafts = stop
            measured_s = self._costs.cost(size, is_ahead=False)
            cost_s = measured_s or cost_s
            if cost_s * num_steps / num_seqs < best[1]:
                best = num_drafts, cost_s * num_steps / num_seqs
            if measured_s is None and is_careful:
                break
        return best


class ForcedDrafting(MeasuredDrafting):
    """As `MeasuredDrafting`, but sequences without a form meet nothing of it: all others of a step keep their rows.

    While no form runs, nothing is measured.
    """

    def __init__(self, costs: StepCosts) -> None:
        super().__init__(Drafter(), 0, costs)
        self._has_forms = False  # whether a form runs that is looked at
        self._has_room = True  # for so many drafts that they may pay

    def looks_at(self, sequence: Sequence) -> bool:
        """Forms, where drafts may pay."""
        return self._has_room and sequence.forced_by is not None

    def begins_to_look(self, num_running: int, max_num_drafts: int) -> bool:
        """Whether there is room again. A draft saves half a step of its sequence at most: one token of two."""
        had_room, self._has_room = self._has_room, num_running - max_num_drafts / 2 < num_running / MIN_GAIN
        return self._has_room and not had_room

    def waits_for(
        self, step: RunningStep, running: SequenceOf[Sequence], num_rows: int, max_num_drafts: int
    ) -> bool:
        """Whether a token promises to take less time if the next step is planned later, with forced tokens."""
        self._has_forms = any([sequence.forced_by is not None for sequence in running])
        if not self._has_forms:
            self._forget_plans()
            return False
        return super().waits_for(step, running, num_rows, max_num_drafts)

    def begin_step(self, decodes: SequenceOf[Sequence], num_rows: int, max_num_drafts: int) -> None:
        """Divides drafts, if there are forms."""
        if self._has_forms:
            super().begin_step(decodes, num_rows, max_num_drafts)

    def on_step(self, stats: StepStats, started: Iterable[Sequence], outputs: Iterable[SequenceOutput]) -> None:
        """Notes what a step has cost, if there are forms."""
        if self._has_forms:
            super().on_step(stats, started, outputs)


def may_have_drafts(sequence: Sequence) -> bool:
    """Whether the options of a sequence allow drafts.

    Penalties, bad words and a limit of reasoning depend on the previous tokens, which are uncertain after a draft.
    Tokens are not sampled where there is a row policy.
    """
    if sequence.policy is not None or not all([each.allows_drafts for each in sequence.features]):
        return False
    return not sequence.spec.sampling.depends_on_output


def room_for_drafts(sequence: Sequence, session: Session, step: PlanBuilder) -> int:
    """The number of drafts that a step may have after a sequence's remaining tokens; 0 or less: none.

    Drafts never take budget or blocks from other sequences. Where tokens are forced there are as many as these.
    """
    if sequence.num_pending_tokens or not may_have_drafts(sequence):
        return 0
    ledger, num_remaining = session.ledger_of(sequence), sequence.num_remaining_tokens
    num_blocks = sequence.num_evicted_blocks + sequence.num_blocks + sequence.num_reserved_blocks
    num_blocks += ledger.num_available_blocks
    num_others = session.num_running_rows - 1 - len(step.entries)  # that the step has no entry for yet
    forced_by = sequence.forced_by
    num_forced = step.num_tokens if forced_by is None else len(forced_by.forced_token_ids)
    return min(
        num_forced,
        sequence.spec.max_tokens - len(sequence.output_token_ids) - 1,
        step.num_tokens - num_remaining - num_others,
        step.num_logits - 1 - num_others,
        num_blocks * ledger.block_size - sequence.num_computed_tokens - num_remaining,
    )


def _savings(chances: SequenceOf[float]) -> list[float]:
    """What each draft of a sequence takes off from the number of steps per token, which is 1 without drafts; falling.

    chances: of the drafts to be accepted, falling
    """
    savings, num_tokens = [], 1.0
    for chance in chances:
        savings.append(1.0 / num_tokens - 1.0 / (num_tokens + chance))
        num_tokens += chance
    return savings
