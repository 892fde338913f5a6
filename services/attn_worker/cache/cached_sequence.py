"""The records of the KV cache about sequences and steps, and the results of its calls."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from services.attn_worker.cache.tiers.tier import MissingBlock
from services.attn_worker.runner.step_metadata import StepMetadata
from services.common.errors import TwostrokeError
from services.step.prompt_span import PromptSpan


@dataclass(frozen=True, slots=True)
class OpenResult:
    """The state of a sequence after it was opened."""

    num_cached_tokens: int  # tokens with keys and values in the cache; the scheduler continues there
    num_pinned_blocks: int  # blocks this call took out of the free pool
    num_held_blocks: int  # blocks the sequence holds now, shared ones included
    num_freed_blocks: int  # blocks this call returned to the free pool: rolled back or dropped ones
    # Blocks whose content must be loaded before the sequence may run, be forked or stay without its dense worker.
    missing: tuple[MissingBlock, ...] = ()
    num_copied_blocks: int = 0  # that came from another attention worker; they are cached ones
    has_extra_rows: bool = True  # whether its extra rows, if there are any, are in the cache


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """A step that is ready to run, and the errors of sequences that cannot take part."""

    metadata: StepMetadata
    # By group: (from, to) of each; copied before the layers run and after all earlier steps.
    block_copies: list[list[tuple[int, int]]]
    num_freed_blocks: int  # blocks freed by the sequences that this step closes, and evicted behind windows
    errors: dict[int, TwostrokeError]  # by seq_id; these sequences do not advance, or were not forked


@dataclass(slots=True)
class InFlight:
    """A planned step that may still be running; some of its sequences may have been closed since."""

    rows: np.ndarray  # int64 [num_sequences]
    generations: np.ndarray  # int64 [num_sequences], of the rows then: one that was freed since has another
    lengths: np.ndarray  # int64 [num_sequences], including the step's tokens but not its drafts


@dataclass(slots=True, eq=False)
class CachedSequence:
    """The cache's record of a sequence, in addition to its row."""

    row: int  # in all groups
    root: bytes
    generation: int  # of prefixes, when it was opened first
    token_ids: array[int]  # uint32; all known tokens; may be fewer than the computed ones
    digests: list[bytes]  # of its leading full blocks
    spans: Sequence[PromptSpan] = ()  # of its prompt
    is_orphan: bool = False  # its dense worker is gone, and nobody has opened it since
