"""`PartedKVCache`: a KV cache that also has parts of sequences. Engine thread, as for `KVCache`.

A part takes all its blocks when it is opened, and holds them until the sequence is closed or its dense worker is gone:
then the sequence is computed again. Nothing of it is findable by others. A step has the sequence's entry in each worker
that has a part of it, so that positions alone say what is stored where.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from services.attn_worker.cache.cached_sequence import OpenResult, PlannedStep
from services.attn_worker.cache.kv_cache import KVCache
from services.attn_worker.split_context.part_rows import PartRows, RowsOfParts
from services.common.errors import InvalidRequest
from services.step import StepPlan


@dataclass(frozen=True, slots=True)
class _Part:
    tokens: range
    block_ids: np.ndarray  # int64


class PartedKVCache(KVCache):
    """Takes the blocks of parts from the pool of its only group of blocks."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        assert self.can_load_blocks, "`check_split_context` refuses windows and states"
        self._parts: dict[int, _Part] = {}  # by seq_id

    @property
    def num_sequences(self) -> int:
        return super().num_sequences + len(self._parts)

    def open_part(self, seq_id: int, tokens: range) -> OpenResult:
        if tokens.start % self.block_size or tokens.stop <= tokens.start:
            raise InvalidRequest(
                f"a part of sequence {seq_id} has the tokens from {tokens.start} to before {tokens.stop}: it must have"
                f" some, from a multiple of block_size {self.block_size} on"
            )
        num_freed = self.close_sequences([seq_id])
        block_ids = self._main.pool.allocate(-(-len(tokens) // self.block_size))
        self._parts[seq_id] = _Part(tokens, np.array(block_ids))
        return OpenResult(seq_id, 0, len(block_ids), len(block_ids), num_freed)

    def plan_step(self, plan: StepPlan) -> PlannedStep:
        entries = plan.entries
        has_part = np.array([each in self._parts for each in entries.seq_ids.tolist()], bool)
        if not has_part.any():
            return super().plan_step(plan)
        first_rows = np.cumsum(entries.num_tokens) - entries.num_tokens
        parts = []
        for index in np.flatnonzero(has_part).tolist():
            entry, part = entries[index], self._parts[entries.seq_ids.item(index)]
            positions = range(entry.position, entry.position + entry.num_tokens)
            parts.append(PartRows(first_rows.item(index), positions, part.tokens, part.block_ids))
        is_part = np.repeat(has_part, entries.num_tokens)
        step = super().plan_step(replace(plan, entries=entries.where(~has_part)))
        rows = RowsOfParts(tuple(parts), np.flatnonzero(~is_part))
        metadata = replace(step.metadata.with_other(rows), num_other_rows=int(np.count_nonzero(is_part)))
        return replace(step, metadata=metadata)

    def close_sequences(self, seq_ids: Iterable[int]) -> int:
        seq_ids = list(seq_ids)
        return super().close_sequences(seq_ids) + self._drop_parts(seq_ids)

    def abort_steps(self) -> int:
        return super().abort_steps() + self._drop_parts(list(self._parts))

    def _drop_parts(self, seq_ids: Iterable[int]) -> int:
        parts = (part for seq_id in seq_ids if (part := self._parts.pop(seq_id, None)) is not None)
        return sum(self._main.pool.release(part.block_ids.tolist()) for part in parts)
