"""`PlanSplitter`: the part of each step that is one attention worker's. Engine thread."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from services.step import NO_ENTRIES, NO_TOKENS, StepPlan, TokenColumns


@dataclass(frozen=True, slots=True)
class SplitPlan:
    """A plan, dealt to the attention workers by what they have."""

    step_id: int
    parts: Mapping[int, StepPlan]  # by cache_id; none for those that have nothing to do
    rows: Mapping[int, np.ndarray]  # by cache_id: int64 [num_rows], its rows of the step, ascending
    frees_blocks: bool  # whether the engine waits for an answer


class PlanSplitter:
    """Remembers which attention worker has which sequence, as of the newest plan."""

    def __init__(self, orphans: Mapping[int, int]) -> None:
        """`orphans`: the cache_ids of sequences that an earlier dense worker left open, by seq_id."""
        self._cache_of = dict(orphans)  # by seq_id
        # By cache_id: the sequences of which it has a part. Their `_cache_of` is that of one of their parts.
        self._parts = defaultdict[int, set[int]](set)
        self._sampled = defaultdict[int, list[TokenColumns]](list)  # by cache_id: for the next step that it gets
        self._last = np.zeros(0, np.uint64), np.zeros(0, np.int64)  # seq_ids of a step's entries, and their cache_ids

    def split(self, plan: StepPlan) -> SplitPlan:
        """The parts of the next plan."""
        cache_of = self._cache_of
        self._keep_sampled(plan.sampled)
        closes = defaultdict[int, list[int]](list)
        kept_in = {seq_id: cache_of.get(seq_id) for seq_id in plan.kept_seq_ids}
        for seq_id in plan.close_seq_ids:  # first, for the id of a beam that has ended may be that of a new one
            for cache_id in self._take_caches_of(seq_id):
                closes[cache_id].append(seq_id)
        for new in plan.new_sequences:
            cache_of[new.seq_id] = new.cache_id
            if new.part is not None:
                self._parts[new.cache_id].add(new.seq_id)
        for fork in plan.forks:
            cache_of[fork.child_seq_id] = cache_of[fork.parent_seq_id]
        of_entries = self._caches_of(plan.entries.seq_ids)
        own = {cache_id: of_entries == cache_id for cache_id in np.unique(of_entries).tolist()}
        for cache_id, seq_ids in self._parts.items():
            if seq_ids and (has_part := np.isin(plan.entries.seq_ids, np.array(list(seq_ids), np.uint64))).any():
                own[cache_id] = own.get(cache_id, False) | has_part
        opens = {new.cache_id for new in plan.new_sequences}
        parts = {}
        for cache_id in sorted({*own, *closes, *opens}):
            entries = plan.entries.where(own[cache_id]) if cache_id in own else NO_ENTRIES
            is_step = bool(len(entries) or closes[cache_id])
            parts[cache_id] = StepPlan(
                plan.step_id,
                entries,
                tuple(closes[cache_id]),
                self._take_sampled(cache_id) if is_step else NO_TOKENS,
                tuple(each for each in plan.forks if cache_of[each.child_seq_id] == cache_id),
                tuple(new for new in plan.new_sequences if new.cache_id == cache_id),
                tuple(each for each in plan.forced if cache_of.get(each[0]) == cache_id),
                plan.lane,
                evicts_blocks=plan.evicts_blocks and len(entries) > 0,
                kept_seq_ids=tuple(each for each in plan.kept_seq_ids if kept_in[each] == cache_id),
            )
        has_rows = plan.num_tokens > len(of_entries)  # more than one for some entry
        rows = {
            cache_id: np.flatnonzero(np.repeat(each, plan.entries.num_tokens) if has_rows else each)
            for cache_id, each in own.items()
        }
        return SplitPlan(plan.step_id, parts, rows, plan.frees_blocks)

    def forget(self, cache_id: int) -> None:
        """An attention worker is gone, with its sequences; later plans have none of them."""
        self._sampled.pop(cache_id, None)
        self._parts.pop(cache_id, None)
        self._cache_of = {seq_id: each for seq_id, each in self._cache_of.items() if each != cache_id}

    def _take_caches_of(self, seq_id: int) -> set[int]:
        """Those that have something of a sequence, which is forgotten."""
        caches = {self._cache_of.pop(seq_id, None)}
        for cache_id, seq_ids in self._parts.items():
            if seq_id in seq_ids:
                seq_ids.remove(seq_id)
                caches.add(cache_id)
        return {each for each in caches if each is not None}

    def _caches_of(self, seq_ids: np.ndarray) -> np.ndarray:
        """cache_ids, int64 [num_entries]. Steps of the same rows share the array of their seq_ids."""
        if self._last[0] is not seq_ids:
            self._last = seq_ids, np.array([self._cache_of[each] for each in seq_ids.tolist()], np.int64)
        return self._last[1]

    def _keep_sampled(self, sampled: TokenColumns) -> None:
        if len(sampled):
            caches = np.array([self._cache_of.get(each, -1) for each in sampled.seq_ids.tolist()])
            for cache_id in np.unique(caches[caches >= 0]).tolist():
                is_own = caches == cache_id
                self._sampled[cache_id].append(TokenColumns(sampled.seq_ids[is_own], sampled.token_ids[is_own]))

    def _take_sampled(self, cache_id: int) -> TokenColumns:
        chunks = self._sampled.pop(cache_id, [])
        if len(chunks) <= 1:
            return chunks[0] if chunks else NO_TOKENS
        columns = [(each.seq_ids, each.token_ids) for each in chunks]
        return TokenColumns(*(np.concatenate(column) for column in zip(*columns, strict=True)))
