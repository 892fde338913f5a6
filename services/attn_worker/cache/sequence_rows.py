"""`SequenceRows`: the rows and lengths of all sequences, which all groups share. Part of the KV cache."""

from __future__ import annotations

import numpy as np

NO_SEQUENCE = 0  # row for entries of unknown sequences: empty, all null blocks
_INITIAL_NUM_ROWS = 64


class SequenceRows:
    """One row of numpy arrays per sequence. Rows are reused; the cache adds them here and in all groups when needed.

    The arrays are replaced when rows are added, so read them by name each time.
    """

    def __init__(self) -> None:
        self._free_rows: list[int] = []
        self._counts = np.zeros((4, 0), np.int64)
        self.generations = np.zeros(0, np.int64)  # [num_rows]; another one for each sequence that a row has had

    def __len__(self) -> int:
        return self._counts.shape[1]

    @property
    def num_to_add(self) -> int:
        """Rows to add before the next one can be taken; 0: one is free."""
        return 0 if self._free_rows else max(_INITIAL_NUM_ROWS, len(self))

    def add_rows(self, num_new: int) -> None:
        """Adds empty rows."""
        first = max(NO_SEQUENCE + 1, len(self))
        self._free_rows.extend(reversed(range(first, len(self) + num_new)))
        self._counts = np.pad(self._counts, ((0, 0), (0, num_new)))
        self.generations = np.pad(self.generations, (0, num_new))
        # Views, int64 [num_rows]; num_computed is ahead of num_committed while a step runs.
        self.num_prompt_tokens, self.num_computed, self.num_committed, self.num_hashed_blocks = self._counts

    def take(self) -> int:
        """An empty row. There must be one."""
        return self._free_rows.pop()

    def free_row(self, row: int) -> None:
        """Empties a row."""
        self._counts[:, row] = 0
        self.generations[row] += 1
        self._free_rows.append(row)

    def check_integrity(self, used_rows: set[int]) -> None:
        """Counts everything again; raises AssertionError on any disagreement."""
        assert sorted(set(range(1, len(self))) - used_rows) == sorted(self._free_rows)
