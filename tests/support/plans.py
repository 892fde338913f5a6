"""Builds plans for tests, entry by entry."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from services.attn_worker.cache.build_cache import WindowBlocks
from services.common.kv_cache.sliding_window import SlidingWindow
from services.step import Fork, PlanEntries, PlanEntry, StepPlan, TokenColumns


def make_plan(
    entries: Iterable[tuple[int, int, int]] = (),
    close_seq_ids: Iterable[int] = (),
    sampled: Iterable[tuple[int, int]] = (),
    forks: Iterable[tuple[int, int, int]] = (),
    drafts: dict[int, tuple[int, ...]] | None = None,
    forced: Iterable[tuple[int, int]] = (),
) -> StepPlan:
    """A plan of step 1. `entries`: (seq_id, num_tokens, position). `drafts`: the last tokens of an entry, by seq_id.

    `forks`: (parent, child, position).
    """
    planned = []
    for seq_id, num_tokens, position in entries:
        draft_token_ids = (drafts or {}).get(seq_id, ())
        planned.append(PlanEntry(seq_id, position, num_tokens, 1 + len(draft_token_ids), draft_token_ids))
    return StepPlan(
        1,
        PlanEntries.of(planned),
        tuple(close_seq_ids),
        TokenColumns.of(sampled),
        tuple(Fork(*fork) for fork in forks),
        forced=tuple(forced),
    )


def plan_of(step_id: int, *entries: PlanEntry, **columns: Any) -> StepPlan:
    """A plan with these entries."""
    return StepPlan(step_id, PlanEntries.of(entries), **columns)


def make_window_group(
    window: int | None, block_size: int, max_num_seqs: int, max_num_step_tokens: int
) -> WindowBlocks | None:
    """Blocks for the layers with a window, as many as these sequences and steps may need; None: without a window."""
    if window is None:
        return None
    return WindowBlocks(window, SlidingWindow(block_size, window).pool_blocks(max_num_seqs, max_num_step_tokens))
