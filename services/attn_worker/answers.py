"""Builds the attention worker's answers to plans from their effects on the cache."""

from __future__ import annotations

from services.attn_worker.cache.cached_sequence import OpenResult
from services.attn_worker.engine import Accepted
from services.step import PlanAccepted, SequenceOpened


def describe_opened(seq_id: int, result: OpenResult) -> SequenceOpened:
    """The answer for a sequence that has been opened."""
    return SequenceOpened(
        seq_id=seq_id,
        num_cached_tokens=result.num_cached_tokens,
        num_pinned_blocks=result.num_pinned_blocks,
        num_held_blocks=result.num_held_blocks,
        num_freed_blocks=result.num_freed_blocks,
    )


def describe_accepted(accepted: Accepted) -> PlanAccepted:
    """The answer for a plan that has been accepted."""
    return PlanAccepted(
        step_id=accepted.plan.step_id,
        num_freed_blocks=accepted.step.num_freed_blocks,
        num_free_blocks=accepted.num_free_blocks,
        errors={seq_id: str(error) for seq_id, error in accepted.step.errors.items()},
    )
