"""The records of the KV cache about sequences and steps, and the results of its calls. Part of `kv_cache.py`."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from services.attn_worker.runner.step_metadata import StepMetadata
from services.common.errors import TwostrokeError


@dataclass(frozen=True, slots=True)
class OpenResult:
    """The state of a sequence after it was opened."""

    num_cached_tokens: int  # tokens with keys and values in the cache; the scheduler continues there
    num_pinned_blocks: int  # blocks this call took out of the free pool
    num_held_blocks: int  # blocks the sequence holds now, shared ones included
    num_freed_blocks: int  # blocks this call returned to the free pool: rolled back or dropped ones


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """A step that is ready to run, and the errors of sequences that cannot take part."""

    metadata: StepMetadata
    block_copies: list[tuple[int, int]]  # (from, to); copy before the layers run and after all earlier steps
    window_block_copies: list[tuple[int, int]]  # the same for blocks of `StepMetadata.windows`
    num_freed_blocks: int  # blocks freed by the sequences that this step closes, and dropped behind windows
    errors: dict[int, TwostrokeError]  # by seq_id; these sequences do not advance, or were not forked


@dataclass(slots=True, eq=False)
class Checkpoint:
    """A state of gated delta layers within a step's tokens, for the prefix cache alone. See `SequenceStates`."""

    row: int  # of its sequence
    length: int  # the tokens it is the state of, full blocks
    slot: int | None  # None: given up since


@dataclass(frozen=True, slots=True)
class InFlight:
    """A planned step that may still be running; some of its sequences may have been closed since."""

    sequences: list[CachedSequence]
    lengths: list[int]  # of each sequence, including the step's tokens but not its drafts, which may be rejected
    checkpoints: list[Checkpoint] = field(default_factory=list)  # findable once the step is committed


@dataclass(slots=True, eq=False)
class CachedSequence:
    """The cache's record of a sequence, in addition to its row of the block tables."""

    row: int  # of the block tables
    root: bytes
    token_ids: array[int]  # uint32; all known tokens; may be fewer than the computed ones
    digests: list[bytes]  # of its leading full blocks
    is_orphan: bool = False  # its dense worker is gone, and nobody has opened it since
