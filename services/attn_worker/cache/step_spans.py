"""What a step knows of spans in prompts: positions in their grids, and how far tokens see in them. Of the KV cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from services.attn_worker.cache.group import Batch
from services.step.prompt_span import PromptSpan, rope_positions


@dataclass(frozen=True, slots=True)
class RopePositions:
    """Of one sequence."""

    table: np.ndarray  # int32 [3, end of the last grid]
    offset: int  # what is added to the index of the tokens after it

    @classmethod
    def of(cls, spans: Sequence[PromptSpan]) -> RopePositions | None:
        """None: all axes have the index of the token."""
        return cls(*rope_positions(spans)) if any(span.grid_rows for span in spans) else None


def positions_of_step(
    positions: np.ndarray, batch: Batch, by_row: Mapping[int, RopePositions]
) -> np.ndarray | None:
    """The positions of a step's tokens, int32 [3, num_tokens]; None: each has its index on all axes.

    positions: int32 [num_tokens], their indexes; by_row: of the cache's rows that have grids
    """
    indexes = [index for index, row in enumerate(batch.rows.tolist()) if row in by_row]
    if not indexes:
        return None
    found = np.repeat(positions[None], 3, axis=0)
    ends = np.cumsum(batch.num_tokens)
    for index in indexes:
        own, end = by_row[int(batch.rows[index])], int(ends[index])
        entry = found[:, end - int(batch.num_tokens[index]) : end]
        num_in_table = int(np.searchsorted(entry[0], own.table.shape[1]))
        entry[:, num_in_table:] += own.offset
        entry[:, :num_in_table] = own.table[:, entry[0, :num_in_table]]
    return found


def num_later_of_step(batch: Batch, by_row: Mapping[int, Sequence[PromptSpan]]) -> np.ndarray | None:
    """How many tokens of its span are after each token of a step, int32 [num_tokens]; None: no token is in a span.

    by_row: of the cache's rows that have spans
    """
    found: np.ndarray | None = None
    ends = np.cumsum(batch.num_tokens)
    for index, row in enumerate(batch.rows.tolist()):
        position, count = int(batch.positions[index]), int(batch.num_tokens[index])
        for span in by_row.get(row, ()):
            start, end = max(span.start, position), min(span.end, position + count)
            if start < end:
                if found is None:
                    found = np.zeros(int(ends[-1]), np.int32)
                first = int(ends[index]) - count - position
                found[first + start : first + end] = span.end - 1 - np.arange(start, end)
    return found
