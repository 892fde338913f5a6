"""Plans and their results as `protos/attn.proto` has them, and as the engine does."""

from __future__ import annotations

from services.attn_worker.engine import Accepted, Plan
from services.attn_worker.kv_cache import OpenResult
from services.common.errors import InvalidRequest
from services.pb import attn_pb2


def decode_plan(plan: attn_pb2.StepPlan) -> Plan:
    """Raises `InvalidRequest` when the columns are not of equal length."""
    columns = (plan.seq_ids, plan.num_tokens, plan.num_computed_tokens)
    confirmed = (plan.confirmed_seq_ids, plan.confirmed_token_ids)
    try:
        return Plan(
            plan.step_id,
            list(zip(*columns, strict=True)),
            list(plan.close_seq_ids),
            list(zip(*confirmed, strict=True)),
        )
    except ValueError as error:
        raise InvalidRequest(f"columns of plan {plan.step_id} differ in length: {error}") from error


def encode_opened(seq_id: int, result: OpenResult) -> attn_pb2.SequenceOpened:
    """What the dense worker needs to know of a sequence that has been opened."""
    return attn_pb2.SequenceOpened(
        seq_id=seq_id,
        num_cached_tokens=result.num_cached_tokens,
        num_pinned_blocks=result.num_pinned_blocks,
        num_held_blocks=result.num_held_blocks,
        num_freed_blocks=result.num_freed_blocks,
    )


def encode_result(step_id: int, accepted: Accepted) -> attn_pb2.StepResult:
    """What the dense worker needs to know of an accepted plan."""
    return attn_pb2.StepResult(
        step_id=step_id,
        num_freed_blocks=accepted.step.num_freed_blocks,
        num_free_blocks=accepted.num_free_blocks,
        errors=[
            attn_pb2.SequenceError(seq_id=seq_id, message=str(error))
            for seq_id, error in accepted.step.errors.items()
        ],
    )
