"""`StepPlan`: what a step does, as the scheduler decided. The runner and the attention worker follow it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from services.dense_worker.sequence import Sequence


@dataclass(frozen=True, slots=True)
class PlanEntry:
    """One sequence's part in a step: tokens `[num_computed_tokens, num_computed_tokens + num_tokens)`."""

    sequence: Sequence
    num_tokens: int
    num_computed_tokens: int  # before the step
    is_sampled: bool  # whether the step yields this sequence's next token


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What a step does; `entries` are in batch order."""

    step_id: int
    entries: tuple[PlanEntry, ...]
    close_seq_ids: tuple[int, ...]  # to close before the step
    confirmed: tuple[tuple[int, int], ...]  # (seq_id, token_id) known since the last plan

    @property
    def num_tokens(self) -> int:
        return sum(entry.num_tokens for entry in self.entries)


def spans_of(plans: Iterable[StepPlan]) -> dict[int, range]:
    """Indexes of the tokens that these steps compute, by seq_id."""
    spans: dict[int, range] = {}
    for entry in (entry for plan in plans for entry in plan.entries):
        span = range(entry.num_computed_tokens, entry.num_computed_tokens + entry.num_tokens)
        spans[entry.sequence.seq_id] = range(spans.get(entry.sequence.seq_id, span).start, span.stop)
    return spans
