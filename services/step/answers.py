"""The attention worker's answers to a plan: the sequences it opened, and the blocks that closed sequences freed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SequenceOpened:
    """The answer to one `NewSequence`: how much of it the KV cache holds, or why it was refused."""

    seq_id: int
    num_cached_tokens: int = 0  # leading tokens that are cached; fewer than the sequence has
    num_pinned_blocks: int = 0  # blocks that left the free pool
    num_held_blocks: int = 0  # blocks that the sequence holds now
    num_freed_blocks: int = 0  # blocks that the sequence held (left by a dead dense worker) and could not keep
    has_extra_rows: bool = True  # whether its extra rows, if there are any, are in the KV cache
    error: str | None = None  # why the sequence was refused; all counts are then 0
    cache_id: int = 0  # which of several attention workers answers; not sent


@dataclass(frozen=True, slots=True)
class PlanAccepted:
    """The worker has accepted a plan; its layers have not run yet. Sent only if the plan opened or closed
    sequences or dropped blocks, or if an entry could not take part.
    """

    step_id: int
    num_freed_blocks: int = 0  # of the sequences that the plan closed, and of dropped blocks
    num_free_blocks: int = 0  # free blocks after the plan, cached prefixes included
    errors: Mapping[int, str] | None = None  # by seq_id: entries that could not take part; their rows are meaningless
    cache_id: int = 0  # which of several attention workers answers; not sent
    is_last: bool = True  # whether no other one will answer this plan; not sent
