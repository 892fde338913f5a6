"""What the attention worker answers to a plan: whom it opened, and what closed sequences gave back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SequenceOpened:
    """The answer to one `NewSequence`: where it stands in the KV cache, or why it was refused."""

    seq_id: int
    num_cached_tokens: int = 0  # leading tokens that need not be computed; fewer than it has
    num_pinned_blocks: int = 0  # blocks that left the free pool
    num_held_blocks: int = 0  # blocks it holds now
    num_freed_blocks: int = 0  # blocks it held before, as of a dead dense worker, and could not keep
    error: str | None = None  # it is not open; all else is 0


@dataclass(frozen=True, slots=True)
class PlanAccepted:
    """The plan has been taken, before its layers run. Sent only if there is something to tell."""

    step_id: int
    num_freed_blocks: int = 0  # by the sequences it closed
    num_free_blocks: int = 0  # after it, cached prefixes included
    errors: Mapping[int, str] | None = None  # by seq_id, of entries that could not take part: their rows mean nothing
