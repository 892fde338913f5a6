"""`StepPlanner`: which running sequences advance in the next step, and by how many tokens. Part of the scheduler."""

from __future__ import annotations

from collections.abc import Callable

from services.dense_worker.engine.beams.beam_blocks import take_beam_blocks
from services.dense_worker.engine.drafts import DraftSource, room_for_drafts
from services.dense_worker.engine.fairness.step_shares import divide_prefills, limit_decodes, newcomers
from services.dense_worker.engine.fairness.victims import choose_victim_of_shortage, put_largest_last
from services.dense_worker.engine.limits import SchedulerLimits
from services.dense_worker.engine.planning.plan_builder import PlanBuilder
from services.dense_worker.engine.planning.siblings import Siblings, is_source
from services.dense_worker.engine.sequence import Sequence, SequenceStatus
from services.dense_worker.engine.session import Session
from services.dense_worker.engine.waiting_queue import WaitingQueue


class StepPlanner:
    """Of one attachment.

    Sequences that need a single token go first, so that a long prompt cannot stall running streams. Prompts share the
    rest of the step.
    """

    def __init__(
        self,
        session: Session,
        waiting: WaitingQueue,
        limits: SchedulerLimits,
        drafts: DraftSource | None,
        siblings: Siblings,
        preempt: Callable[[Sequence], None],
        drop_held_blocks: Callable[[], None],
    ) -> None:
        """`preempt` makes a running sequence wait again; `drop_held_blocks` gives up blocks from before."""
        self._session = session
        self._waiting = waiting
        self._limits = limits
        self._drafts = drafts
        self._siblings = siblings
        self._preempt = preempt
        self._drop_held_blocks = drop_held_blocks
        self._has_given_way = False  # whether the last step was only for newcomers

    def plan_step(self, suspect: Sequence | None) -> PlanBuilder | None:
        """The entries of the next step, perhaps none. None: the plan waits for sequences that are being opened.

        `suspect`: the only sequence that may run now; None: all may
        """
        session = self._session
        session.is_short_of_blocks = False
        step = PlanBuilder(self._limits.max_num_batched_tokens, self._limits.max_num_seqs)
        decodes, prefills = list[Sequence](), list[tuple[Sequence, int]]()
        running = session.running
        if session.joining:
            running = [sequence for sequence in running if sequence not in session.joining]
        for sequence in running:
            if (suspect is not None and sequence is not suspect) or sequence.num_draft_tokens:
                continue
            if sequence.beams is not None and sequence.num_pending_tokens:
                continue  # the result of its last step decides which beams go on
            num_remaining = sequence.num_remaining_tokens
            if num_remaining > 1:
                prefills.append((sequence, _num_to_compute(sequence)))
            elif num_remaining == 1:
                decodes.append(sequence)
        shares = None  # how many tokens each prompt gets; None: as many as are left
        is_shared = self._waiting.has_several_clients
        if is_shared and not self._has_given_way and running:
            if newcomers(running, (each.sequence for each in session.openings.values())):
                return None  # they may come into this plan; the answer to their opening is on its way
            if new := newcomers(decodes, (sequence for sequence, _ in prefills)):
                decodes, prefills = [], [each for each in prefills if each[0] in new]
                self._has_given_way = True  # the next step is for all
        elif running:
            self._has_given_way = False
        if is_shared:
            decodes = limit_decodes(decodes, prefills, step.num_tokens)
            if session.ledger.num_available_blocks < len(decodes):
                decodes = put_largest_last(decodes)
        if self._drafts is not None:  # steps that compute prompts have none
            has_prompts = bool(prefills or session.joining)
            self._drafts.begin_step(decodes, 0 if has_prompts else self._limits.max_num_seqs - session.num_running_rows)
        if session.joining and suspect is None:
            self._plan_forks(step)
        for sequence in decodes:
            self._plan(step, sequence, 1, is_last=True)
        if is_shared and prefills:
            shares = divide_prefills(prefills, [entry.sequence for entry in step.planned], step.num_tokens)
            # A search may have a share of less than one token for each beam: it needs the rest from those behind it.
            prefills = [*prefills[:1], *sorted(prefills[1:], key=lambda each: not _has_forked(each[0]))]
        for sequence, num_remaining in prefills:
            num_tokens = min(num_remaining if shares is None else shares[sequence], step.num_tokens)
            if num_tokens:
                self._plan(step, sequence, num_tokens, is_last=num_tokens == sequence.num_remaining_tokens)
        return step

    def _plan(self, step: PlanBuilder, sequence: Sequence, num_tokens: int, *, is_last: bool) -> None:
        """Adds an entry for `num_tokens` known or pending tokens; with the last one, also for drafts if they fit."""
        if sequence.beams is not None and _has_forked(sequence):
            self._plan_beams(step, sequence, num_tokens)
            return
        drafts: tuple[int, ...] = ()
        if is_last and self._drafts is not None:
            room = room_for_drafts(sequence, self._session, step)
            drafts = tuple(self._drafts.propose(sequence, room)) if room > 0 else ()
        if sequence.status is not SequenceStatus.RUNNING:
            return  # preempted in this plan
        num_blocks = self._session.take_blocks(sequence, num_tokens + len(drafts))
        if num_blocks is None:
            self._give_up_blocks(step)
        else:
            has_dropped = self._session.drop_blocks(sequence)
            step.add(sequence, num_tokens, drafts, is_last + len(drafts), num_blocks, has_dropped)

    def _plan_forks(self, step: PlanBuilder) -> None:
        """Forks the sequences whose siblings have computed the prompt. One that has lost its sibling waits again."""
        session = self._session
        for sequence, source in list(session.joining.items()):
            if not is_source(source, session):
                other = self._siblings.source_of(sequence, session)
                if other is None:
                    self._preempt(sequence)
                else:
                    session.joining[sequence] = other
            elif source.num_computed_tokens >= sequence.num_computed_tokens and min(step.num_tokens, step.num_logits):
                num_blocks = session.share_blocks(source, sequence)
                step.add_fork(sequence, source, num_blocks, session.drop_blocks(sequence))

    def _plan_beams(self, step: PlanBuilder, sequence: Sequence, num_tokens: int) -> None:
        """Adds as many tokens of every beam, at least one, or nothing: all beams are in the same step.

        num_tokens: how many of all beams together are wanted
        """
        if sequence.num_beams > min(step.num_tokens, step.num_logits) or sequence.status is not SequenceStatus.RUNNING:
            return
        num_each = max(1, num_tokens // sequence.num_beams)
        num_blocks = take_beam_blocks(self._session, sequence, num_each)
        if num_blocks is not None:
            step.add_beams(sequence, num_each, num_blocks)
        elif not self._session.awaits_beam_blocks:
            self._give_up_blocks(step)

    def _give_up_blocks(self, step: PlanBuilder) -> None:
        """A running sequence cannot grow. Unless blocks are about to come back, another one gives up its blocks."""
        self._session.is_short_of_blocks = True
        if self._session.awaits_blocks:
            return
        victim = choose_victim_of_shortage(self._session.running, step.seq_ids)
        if victim is not None:
            self._preempt(victim)
        elif not step.seq_ids:  # otherwise the scheduled sequences advance
            self._drop_held_blocks()


def _has_forked(sequence: Sequence) -> bool:
    """Whether the next step computes tokens of each beam."""
    beams = sequence.beams
    return bool(beams and beams.rows) and sequence.num_computed_tokens >= sequence.num_tokens_before_fork


def _num_to_compute(sequence: Sequence) -> int:
    """How many tokens the next steps may compute of a sequence that needs more than one: those of all its beams."""
    if _has_forked(sequence):
        return sequence.num_beams * sequence.num_remaining_tokens
    return sequence.num_tokens_before_fork - sequence.num_computed_tokens
