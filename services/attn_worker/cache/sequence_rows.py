"""`SequenceRows`: the rows and lengths of all sequences, which all groups of layers share. Part of the KV cache."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from services.attn_worker.cache.block_tables import BlockTables

NO_SEQUENCE = 0  # row for entries of unknown sequences: empty, all null blocks
_INITIAL_NUM_ROWS = 64


class SequenceRows:
    """One row of numpy arrays per sequence. Rows are reused, and added when needed, here and in all tables.

    The arrays are replaced when rows are added, so read them by name each time.
    """

    def __init__(self, groups: Sequence[BlockTables]) -> None:
        self._groups = groups
        self._free_rows: list[int] = []
        self._counts = np.zeros((4, 0), np.int64)
        self._add(_INITIAL_NUM_ROWS)
        self._free_rows.remove(NO_SEQUENCE)

    def __len__(self) -> int:
        return self._counts.shape[1]

    def take(self) -> int:
        """An empty row."""
        if not self._free_rows:
            self._add(len(self))
        return self._free_rows.pop()

    def free(self, row: int) -> int:
        """Frees a row and its blocks; returns how many blocks of the first group became free."""
        num_freed, *_ = [tables.free_row(row) for tables in self._groups]
        self._counts[:, row] = 0
        self._free_rows.append(row)
        return num_freed

    def check_integrity(self, used_rows: set[int]) -> None:
        """Counts everything again; raises AssertionError on any disagreement."""
        rows = set(range(1, len(self)))
        assert sorted(rows - used_rows) == sorted(self._free_rows)
        for tables in self._groups:
            tables.check_integrity(used_rows, self.num_computed)

    def _add(self, num_new: int) -> None:
        num_rows = len(self) + num_new
        self._free_rows.extend(reversed(range(num_rows - num_new, num_rows)))
        self._counts = np.pad(self._counts, ((0, 0), (0, num_new)))
        # Views, int64 [num_rows]; num_computed is ahead of num_committed while a step runs.
        self.num_prompt_tokens, self.num_computed, self.num_committed, self.num_hashed_blocks = self._counts
        for tables in self._groups:
            tables.add_rows(num_new)
