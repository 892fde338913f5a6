"""Drafts: guesses of what comes next in a sequence, which a step verifies. Part of the scheduler.

A draft is kept while it equals what the sampler chooses at its place, so that guesses change how many steps a text
takes and nothing else. How many are kept decides the next position: a scheduler with a source of drafts plans a
step when the one before has ended, where others plan it while that one runs (bench/results/steps.md).
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import Protocol

from services.dense_worker.engine.plan_builder import PlanBuilder
from services.dense_worker.engine.sequence import Sequence
from services.dense_worker.engine.session import Session


class DraftSource(Protocol):
    """Knows, or guesses, how texts go on."""

    def propose(self, sequence: Sequence, max_num_tokens: int) -> SequenceOf[int]:
        """At most `max_num_tokens` token ids that may follow; called when all its tokens are known."""


def room_for_drafts(sequence: Sequence, session: Session, step: PlanBuilder) -> int:
    """How many drafts a step may have after a sequence's remaining tokens.

    Drafts take nothing from others: neither their place in the step, nor blocks. Sequences with penalties or bad
    words get none, because these depend on the tokens before, which after a draft are not settled.
    """
    sampling = sequence.sampling
    if sequence.num_pending_tokens or sampling.has_penalties or sampling.bad_words:
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
