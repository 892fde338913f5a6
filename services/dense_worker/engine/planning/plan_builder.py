"""`PlanBuilder`: a step that is being planned. Part of the scheduler."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from services.dense_worker.engine.decode_rows import Decodes
from services.dense_worker.engine.sequence import Sequence
from services.dense_worker.engine.session import PlannedEntry
from services.step import Fork, PlanEntries, PlanEntry


class PlanBuilder:
    """The decode rows and the entries so far, with their forks and chosen tokens, and the rest of the step's budget."""

    def __init__(self, num_tokens: int, num_logits: int, decodes: Decodes) -> None:
        """`decodes`: no rows"""
        self.num_tokens = num_tokens  # the budget's remaining tokens
        self.num_logits = num_logits  # the budget's remaining rows
        self.decodes = decodes  # the step's first entries
        self.entries: list[PlanEntry] = []  # after these
        self.planned: list[PlannedEntry] = []  # aligned with the entries
        self.seq_ids: set[int] = set()  # of the entries' sequences, and of those that are forked
        self.forks: list[Fork] = []
        self.chosen: list[tuple[int, int]] = []  # (seq_id, token_id)
        self.drops_blocks = False

    @property
    def has_entries(self) -> bool:
        return bool(self.entries) or len(self.decodes.positions) > 0

    def scheduled(self) -> set[int]:
        """The seq_ids of all that the step needs to stay open."""
        return self.seq_ids.union(self.decodes.rows.seq_ids.tolist())

    def all_entries(self) -> PlanEntries:
        """The entries in batch order."""
        seq_ids, positions, ones = self.decodes.rows.seq_ids, self.decodes.positions, self.decodes.rows.ones
        if not self.entries:
            return PlanEntries(seq_ids, positions, ones, ones)
        others = PlanEntries.of(self.entries)
        return PlanEntries(
            np.concatenate([seq_ids, others.seq_ids]),
            np.concatenate([positions, others.positions]),
            np.concatenate([ones, others.num_tokens]),
            np.concatenate([ones, others.num_logits]),
            {len(ones) + index: drafts for index, drafts in others.drafts.items()},
        )

    def add(
        self,
        sequence: Sequence,
        num_tokens: int,
        drafts: tuple[int, ...],
        num_logits: int,
        num_blocks: int,
        has_dropped: bool,
    ) -> None:
        """Adds an entry for `num_tokens` known or pending tokens of a sequence, and then for drafts.

        num_logits: number of the entry's last rows that need logits; num_blocks: blocks taken for its tokens;
        has_dropped: whether the sequence drops blocks
        """
        num_planned = num_tokens + len(drafts)
        seq_id = sequence.seq_id
        self.entries.append(PlanEntry(seq_id, sequence.num_computed_tokens, num_planned, num_logits, drafts))
        self.planned.append(PlannedEntry(sequence, num_blocks, has_dropped))
        self.drops_blocks |= has_dropped
        self.seq_ids.add(seq_id)
        self.num_tokens -= num_planned
        self.num_logits -= num_logits
        sequence.num_computed_tokens += num_tokens
        sequence.num_pending_tokens += num_logits > 0
        sequence.num_draft_tokens = len(drafts)

    def add_fork(self, sequence: Sequence, source: Sequence, num_blocks: int, has_dropped: bool) -> None:
        """Forks a sequence from a sibling, and adds an entry for the last token of its prompt."""
        position = sequence.num_computed_tokens
        self.forks.append(Fork(source.seq_id, sequence.seq_id, position))
        self.chosen.append((sequence.seq_id, sequence.spec.prompt_token_ids[position]))
        self.seq_ids.add(source.seq_id)
        self.add(sequence, 1, (), 1, num_blocks, has_dropped)

    def add_beams(self, sequence: Sequence, num_tokens: int, num_blocks: Iterable[int]) -> None:
        """Adds an entry for the next tokens of each beam; `num_blocks`: blocks taken for each."""
        assert sequence.beams is not None, "only a sequence with beams has rows"
        rows, position = sequence.beams.rows, sequence.num_computed_tokens
        is_last = num_tokens == sequence.num_remaining_tokens
        for (seq_id, parent_seq_id, token_ids), num_taken in zip(rows, num_blocks, strict=True):
            if parent_seq_id is not None:
                self.forks.append(Fork(parent_seq_id, seq_id, position))
            self.chosen += [(seq_id, token_id) for token_id in token_ids]
            self.entries.append(PlanEntry(seq_id, position, num_tokens, int(is_last)))
            self.planned.append(PlannedEntry(sequence, num_taken))
        self.seq_ids.add(sequence.seq_id)
        self.num_tokens -= num_tokens * len(rows)
        self.num_logits -= len(rows) * is_last
        sequence.num_computed_tokens += num_tokens
        sequence.num_pending_tokens += is_last
        sequence.beams.note_planned()
