"""Drafts: guesses of a sequence's next tokens, which a step verifies. Part of the scheduler.

A draft is accepted if it equals the token that the sampler chooses at its position, so drafts change only the number
of steps, never the text. The number of accepted drafts decides the next position, and guessing needs all tokens. So a
step with drafts is planned only after the previous step has ended, and so is the step after it
(bench/results/steps.md). All other steps are planned while the previous one runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import Protocol

from services.dense_worker.engine.planning.plan_builder import PlanBuilder
from services.dense_worker.engine.sequence import Sequence, SequenceStatus
from services.dense_worker.engine.session import Session


class DraftSource(Protocol):
    """Guesses how texts continue, and decides when a step waits for guesses."""

    def waits(self, running: SequenceOf[Sequence], max_num_drafts: int) -> bool:
        """Whether the next step is planned only when the one under way has ended. True if that one has drafts.

        max_num_drafts: that the next step may have
        """

    def wanted_guesses(self, running: SequenceOf[Sequence]) -> int:
        """How many tokens heads or a draft model guess after the step under way; 0: they do not run.

        Asked once after each call of `waits`.
        """

    def take(self, sequence: Sequence, guesses: SequenceOf[int]) -> None:
        """Heads or a draft model have guessed the next tokens of a sequence, after all that it has.

        Empty: the draft model is still computing the tokens that the sequence has.
        """

    def begin_step(self, decodes: SequenceOf[Sequence], max_num_drafts: int) -> None:
        """A step is planned now, with a token for each of these sequences, and at most so many drafts."""

    def propose(self, sequence: Sequence, max_num_tokens: int) -> SequenceOf[int]:
        """At most `max_num_tokens` token ids that may follow. Called when all tokens of the sequence are known."""

    def finish(self, sequence: Sequence) -> None:
        """A sequence has ended, for whatever reason."""


@dataclass(slots=True)
class DraftCounts:
    """Total counts of drafts that steps have verified."""

    num_drafts: int = 0  # sequences with drafts in a step
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_at: list[int] = field(default_factory=lambda: [0])  # by place of the draft in its step

    def add(self, num_draft_tokens: int, num_accepted_tokens: int) -> None:
        """Counts the drafts of a sequence in a step, if it had any."""
        if not num_draft_tokens:
            return
        self.num_drafts += 1
        self.num_draft_tokens += num_draft_tokens
        self.num_accepted_tokens += num_accepted_tokens
        self.num_accepted_at += [0] * (num_draft_tokens - len(self.num_accepted_at))
        for place in range(num_accepted_tokens):
            self.num_accepted_at[place] += 1


def take_guesses(
    drafts: DraftSource, sequences: Iterable[Sequence], guesses: Mapping[int, SequenceOf[int]]
) -> None:
    """Passes on guesses, by seq_id, after a step of these sequences, which have their new tokens."""
    for sequence in sequences:
        if sequence.seq_id in guesses and sequence.status is not SequenceStatus.FINISHED:
            drafts.take(sequence, guesses[sequence.seq_id])


def may_have_drafts(sequence: Sequence) -> bool:
    """Whether the options of a sequence allow drafts.

    Penalties, bad words and a limit of reasoning depend on the previous tokens, which are uncertain after a draft. A
    prompt with vectors has token ids that no output can have. Tokens are not sampled where there is a row policy.
    """
    if sequence.prompt_table is not None or sequence.policy is not None:
        return False
    return not sequence.spec.sampling.depends_on_output


def room_for_drafts(sequence: Sequence, session: Session, step: PlanBuilder) -> int:
    """The number of drafts that a step may have after a sequence's remaining tokens.

    Drafts never take budget or blocks from other sequences. With a form of output there are as many as it forces, less
    one: then the masks of all rows are known.
    """
    if sequence.num_pending_tokens or not may_have_drafts(sequence):
        return 0
    ledger, num_remaining = session.ledger, sequence.num_remaining_tokens
    num_blocks = sequence.num_dropped_blocks + sequence.num_blocks + sequence.num_reserved_blocks
    num_blocks += ledger.num_available_blocks
    num_others = session.num_running_rows - 1 - len(step.entries)  # that the step has no entry for yet
    num_forced = step.num_tokens if sequence.grammar is None else len(sequence.grammar.forced_tokens)
    return min(
        num_forced - 1,
        sequence.spec.max_tokens - len(sequence.output_token_ids) - 1,
        step.num_tokens - num_remaining - num_others,
        step.num_logits - 1 - num_others,
        num_blocks * ledger.block_size - sequence.num_computed_tokens - num_remaining,
    )
