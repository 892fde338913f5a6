"""`SequenceCounts`: what changes with each token of a sequence. Part of the scheduler."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


@dataclass(slots=True)
class SequenceCounts:
    """Tokens and blocks; those of a sequence with a row of `DecodeRows` are there instead."""

    num_computed_tokens: int = 0
    num_pending_tokens: int = 0
    num_blocks: int = 0  # blocks that it holds after all published plans have run
    num_reserved_blocks: int = 0  # blocks promised to it but not allocated yet
    slot: ClassVar[None] = None  # it has no row of `DecodeRows`
