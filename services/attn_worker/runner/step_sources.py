"""`StepSources`: where a step's sequences have the keys and values of their encoder's output, and which it writes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class StepSources:
    """A step in layers with cross attention. One slot, the null slot, belongs to no sequence: `num_slots`.

    Before its layers run, the step writes some slots; `writes` are in the order in which the rows come.
    """

    slots: np.ndarray  # int64 [num_seqs]; the null slot for sequences that cannot run
    lengths: np.ndarray  # int64 [num_seqs], rows of the slot that are read; at least 1
    writes: tuple[tuple[int, int], ...] = ()  # (slot, number of rows); the null slot: nobody reads them
