"""`RowsOfParts`: the rows of a step whose sequences have only a part of their keys and values here."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class PartRows:
    """The rows of one sequence: they see the keys of this part up to their own positions."""

    first_row: int  # in the step
    positions: range  # of the rows, in the sequence
    tokens: range  # of which keys and values are here
    block_ids: np.ndarray  # int64, the blocks of these tokens, in order

    @property
    def rows(self) -> np.ndarray:
        """Indices of the rows, int64."""
        return self.first_row + np.arange(len(self.positions))

    @property
    def num_keys(self) -> int:
        """How many keys of this part some row sees."""
        return min(max(self.positions.stop - self.tokens.start, 0), len(self.tokens))


@dataclass(frozen=True, slots=True)
class RowsOfParts:
    """In `StepMetadata.others`; everything else there is of the other rows alone."""

    parts: tuple[PartRows, ...] = ()
    other_rows: np.ndarray | None = None  # int64, the rows of sequences that are here as a whole
