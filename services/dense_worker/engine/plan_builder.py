"""`PlanBuilder`: a step that is being planned. Part of the scheduler."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from typing import NamedTuple

import numpy as np

from services.dense_worker.engine.decode_rows import NO_DECODES
from services.dense_worker.engine.sequence import Sequence
from services.dense_worker.features.row_policy import PlannedRow
from services.step import Fork, PlanEntries, PlanEntry


class PlannedEntry(NamedTuple):
    """The scheduler's data about an entry of a plan."""

    sequence: Sequence
    num_taken_blocks: int  # blocks taken from the ledger for the entry
    has_evicted: bool = False  # whether the sequence drops blocks in this step


class PlanBuilder:
    """The decode rows and the entries so far, with their forks and forced tokens, and the rest of the step's budget."""

    def __init__(self, num_tokens: int, num_logits: int) -> None:
        self.num_tokens = num_tokens  # the budget's remaining tokens; less than 0 behind many extra rows
        self.num_logits = num_logits  # the budget's remaining rows
        self.decodes = NO_DECODES  # the step's first entries
        self.entries: list[PlanEntry] = []  # after these
        self.planned: list[PlannedEntry] = []  # aligned with the entries
        self.seq_ids: set[int] = set()  # of the entries' sequences, and of others that have to stay open
        self.forks: list[Fork] = []
        self.forced: list[tuple[int, int]] = []  # (seq_id, token_id)
        self.evicts_blocks = False
        self.extra_rows: list[tuple[int, int]] = []  # see `StepPlan`

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
        if not len(seq_ids):
            return others
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
        has_evicted: bool,
    ) -> None:
        """Adds an entry for `num_tokens` known or pending tokens of a sequence, and then for drafts.

        num_logits: number of the entry's last rows that need logits; num_blocks: blocks taken for its tokens;
        has_evicted: whether the sequence drops blocks
        """
        assert num_tokens >= 1, f"an entry of {num_tokens} tokens"
        num_planned = num_tokens + len(drafts)
        seq_id = sequence.seq_id
        self.entries.append(PlanEntry(seq_id, sequence.num_computed_tokens, num_planned, num_logits, drafts))
        self.planned.append(PlannedEntry(sequence, num_blocks, has_evicted))
        self.evicts_blocks |= has_evicted
        self.seq_ids.add(seq_id)
        self.num_tokens -= num_planned
        self.num_logits -= num_logits
        sequence.num_computed_tokens += num_tokens
        sequence.num_pending_tokens += num_logits > 0
        sequence.num_draft_tokens = len(drafts)
        for feature in sequence.features:
            feature.planned(sequence, self)

    def room_beside(self, num_extra_rows: int) -> int:
        """How many tokens an entry may have in a step that also has so many extra rows for it.

        They count as tokens, but those of a step's first sequence fit always, however many they are. 0 or less: none.
        """
        if not self.extra_rows and num_extra_rows >= self.num_tokens:
            return self.num_tokens
        return self.num_tokens - num_extra_rows

    def add_extra_rows(self, seq_id: int, num_rows: int) -> None:
        """The extra rows of a sequence that has an entry."""
        self.extra_rows.append((seq_id, num_rows))
        self.num_tokens -= num_rows

    def fork(self, parent_seq_id: int, child_seq_id: int, position: int) -> None:
        """Adds a fork; the step needs the parent to stay open."""
        self.forks.append(Fork(parent_seq_id, child_seq_id, position))
        self.seq_ids.add(parent_seq_id)

    def force(self, seq_id: int, token_ids: Iterable[int]) -> None:
        """Adds tokens to a sequence of the KV cache that no step has sampled for it."""
        self.forced += [(seq_id, token_id) for token_id in token_ids]

    def add_rows(self, sequence: Sequence, rows: SequenceOf[PlannedRow]) -> None:
        """Adds the rows of a sequence that has a row policy, all with as many tokens, and their forks."""
        num_tokens, num_logits = rows[0].entry.num_tokens, rows[0].entry.num_logits
        assert num_tokens >= 1, f"entries of {num_tokens} tokens"
        self.seq_ids.add(sequence.seq_id)
        for entry, num_blocks, parent_seq_id, forced_token_ids in rows:
            if parent_seq_id is not None:
                self.forks.append(Fork(parent_seq_id, entry.seq_id, entry.position))
            self.force(entry.seq_id, forced_token_ids)
            self.entries.append(entry)
            self.planned.append(PlannedEntry(sequence, num_blocks))
        self.num_tokens -= num_tokens * len(rows)
        self.num_logits -= num_logits * len(rows)
        sequence.num_computed_tokens += num_tokens
        sequence.num_pending_tokens += num_logits
