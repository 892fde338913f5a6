"""`PlanBuilder`: a step while it is planned. Part of the scheduler."""

from __future__ import annotations

from services.dense_worker.engine.sequence import Sequence
from services.dense_worker.engine.session import PlannedEntry
from services.step import PlanEntry


class PlanBuilder:
    """The entries so far, and what is left of the step's budget."""

    def __init__(self, num_tokens: int, num_logits: int) -> None:
        self.num_tokens = num_tokens  # left
        self.num_logits = num_logits  # rows left
        self.entries: list[PlanEntry] = []
        self.planned: list[PlannedEntry] = []  # aligned with the entries
        self.seq_ids: set[int] = set()  # of the entries

    def add(
        self, sequence: Sequence, num_tokens: int, drafts: tuple[int, ...], num_logits: int, num_blocks: int
    ) -> None:
        """Lets the sequence advance by `num_tokens` known or pending tokens, and then by drafts.

        num_logits: rows, its last ones; num_blocks: what it took for its tokens
        """
        num_planned = num_tokens + len(drafts)
        seq_id = sequence.seq_id
        self.entries.append(PlanEntry(seq_id, sequence.num_computed_tokens, num_planned, num_logits, drafts))
        self.planned.append(PlannedEntry(sequence, num_blocks))
        self.seq_ids.add(seq_id)
        self.num_tokens -= num_planned
        self.num_logits -= num_logits
        sequence.num_computed_tokens += num_tokens
        sequence.num_pending_tokens += num_logits > 0
        sequence.num_draft_tokens = len(drafts)
