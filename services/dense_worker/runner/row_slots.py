"""The adapter of each row of a step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from services.dense_worker.runner.known_sequence import KnownSequence
from services.step import PlanEntry


def row_slots(entries: Sequence[PlanEntry], sequences: Sequence[KnownSequence], num_rows: int) -> np.ndarray | None:
    """int64 [num_rows]: the slot of each row's adapter, -1 without one and for padding; None if no row has one."""
    slots = [-1 if each.adapter_slot is None else each.adapter_slot for each in sequences]
    if not slots or max(slots) < 0:
        return None
    rows = np.full(num_rows, -1, np.int64)
    found = np.repeat(np.array(slots), [entry.num_tokens for entry in entries])
    rows[: len(found)] = found
    return rows
