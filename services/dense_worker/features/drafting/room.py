"""How many draft tokens a sequence may have, by its options and by what else a step has to compute."""

from __future__ import annotations

from services.dense_worker.engine.planning.plan_builder import PlanBuilder
from services.dense_worker.engine.sequence import Sequence
from services.dense_worker.engine.session import Session


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
