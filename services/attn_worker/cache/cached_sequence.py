"""What the KV cache keeps of sequences and steps, and what it tells of them. Part of `kv_cache.py`."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

from services.attn_worker.runner.step_metadata import StepMetadata
from services.common.errors import TwostrokeError


@dataclass(frozen=True, slots=True)
class OpenResult:
    """Where a sequence stands after it was opened."""

    num_cached_tokens: int  # its keys and values are there; the scheduler continues from here
    num_pinned_blocks: int  # blocks this call took out of the free pool
    num_held_blocks: int  # blocks the sequence holds now, shared ones included
    num_freed_blocks: int  # blocks this call returned to the free pool: rolled back or dropped ones


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """A step ready to run, and what did not fit into it."""

    metadata: StepMetadata
    block_copies: list[tuple[int, int]]  # (from, to): to be made before the layers run, after all earlier steps
    num_freed_blocks: int  # by the sequences closed in this step
    errors: dict[int, TwostrokeError]  # by seq_id; these sequences do not advance, or were not forked


@dataclass(frozen=True, slots=True)
class InFlight:
    """A planned step that may still be running; some of its sequences may have been closed since."""

    sequences: list[CachedSequence]
    lengths: list[int]  # of each, including the step's tokens, but no drafts: nobody knows yet whether they stay


@dataclass(slots=True, eq=False)
class CachedSequence:
    """What the cache knows of a sequence beside its row of the block tables."""

    row: int  # of the block tables
    root: bytes
    token_ids: array[int]  # uint32; all that are known, may lag behind the computed length
    digests: list[bytes]  # of its leading full blocks
