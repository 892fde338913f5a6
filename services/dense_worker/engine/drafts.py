"""Drafts: guesses of a sequence's next tokens, which a step verifies. Part of the scheduler.

A draft is accepted if it equals the token that the sampler chooses at its position, so drafts change only the number
of steps, never the text. The number of accepted drafts decides the next position. So with a source of drafts, the
scheduler plans a step only after the previous step has ended (bench/results/steps.md).
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import Protocol

from services.dense_worker.engine.plan_builder import PlanBuilder
from services.dense_worker.engine.sequence import Sequence
from services.dense_worker.engine.session import Session


class DraftSource(Protocol):
    """Guesses how texts continue."""

    def propose(self, sequence: Sequence, max_num_tokens: int) -> SequenceOf[int]:
        """At most `max_num_tokens` token ids that may follow. Called when all tokens of the sequence are known."""


def room_for_drafts(sequence: Sequence, session: Session, step: PlanBuilder) -> int:
    """The number of drafts that a step may have after a sequence's remaining tokens.

    Drafts never take budget or blocks from other sequences. Sequences with penalties, bad words, a form of output or
    a limit of reasoning get no drafts: these options depend on the previous tokens, which are uncertain after a draft.
    """
    sampling = sequence.sampling
    depends_on_past = sampling.has_penalties or sampling.bad_words or sampling.reasoning_limit is not None
    if sequence.num_pending_tokens or depends_on_past or sequence.grammar is not None:
        return 0
    ledger, num_remaining = session.ledger, sequence.num_remaining_tokens
    num_blocks = sequence.num_blocks + sequence.num_reserved_blocks + ledger.num_available_blocks
    num_others = len(session.running) - 1
    return min(
        sequence.max_tokens - len(sequence.output_token_ids) - 1,
        step.num_tokens - num_remaining - num_others,
        step.num_logits - 1 - num_others,
        num_blocks * ledger.block_size - sequence.num_computed_tokens - num_remaining,
    )
