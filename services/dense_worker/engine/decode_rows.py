"""`DecodeRows`: running sequences that need one token in each step and nothing else, as arrays. Part of the scheduler.

Nearly all sequences of nearly all steps are such. They have no row policy, drafts, log-probabilities, or windows behind
which blocks are dropped, and their first token is known. A step advances all of them by a few operations on arrays. A
sequence leaves before anything else happens to it. While it is here, its counts are here and nowhere else.
"""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from collections.abc import Sequence as SequenceOf
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from services.common.fairness import Client
from services.dense_worker.engine.block_ledger import SequenceCounts
from services.dense_worker.engine.sequence import Sequence

if TYPE_CHECKING:
    from services.dense_worker.engine.block_ledger import BlockLedger
    from services.dense_worker.features.sequence_feature import SequenceFeature

_INITIAL_NUM_SLOTS = 64


class RowCounts:
    """The `SequenceCounts` of a sequence that has a row. They can only be read."""

    __slots__ = ("_rows", "slot")

    def __init__(self, rows: DecodeRows, slot: int) -> None:
        self._rows = rows
        self.slot = slot

    @property
    def num_computed_tokens(self) -> int:
        return self._rows.num_computed.item(self.slot)

    @property
    def num_pending_tokens(self) -> int:
        return self.num_computed_tokens + 1 - self._rows.num_known.item(self.slot)

    @property
    def num_blocks(self) -> int:
        return self._rows.num_blocks.item(self.slot)

    @property
    def num_reserved_blocks(self) -> int:
        return self._rows.num_reserved.item(self.slot)


class PlannedRows(NamedTuple):
    """The rows of a step, in batch order. A slot is used again, so `serials` say whose it was."""

    version: int  # of `DecodeRows` when the rows were looked up
    slots: np.ndarray  # int64 [num_rows]
    serials: np.ndarray  # int64 [num_rows]
    seq_ids: np.ndarray  # uint64 [num_rows]
    sequences: np.ndarray  # object [num_rows]
    streams: np.ndarray  # int64 [num_rows]
    outputs: SequenceOf[list[int]]  # their output tokens
    ones: np.ndarray  # int64 [num_rows]: tokens that each computes, and logits that it needs


class Decodes(NamedTuple):
    """What a step does with its rows. Steps of the same rows share these."""

    rows: PlannedRows
    positions: np.ndarray  # int64 [num_rows]
    has_grown: np.ndarray  # bool [num_rows]: whether a block was taken for the token


_NO_SLOTS = np.zeros(0, np.int64)
_NO_ROWS = PlannedRows(0, _NO_SLOTS, _NO_SLOTS, np.zeros(0, np.uint64), np.zeros(0, object), _NO_SLOTS, (), _NO_SLOTS)
NO_DECODES = Decodes(_NO_ROWS, _NO_SLOTS, np.zeros(0, np.bool_))


class DecodeRows:
    """Owned by the session. Columns are arrays by slot; they are replaced when slots are added.

    num_computed: int64, computed tokens, those of published plans included; the next token is pending or the last known
    num_known: int64, tokens of the prompt, and of the output as far as it is here
    ends: int64, the number of computed tokens after which no further one is needed
    num_of_client: rows by client
    forced_by: what knows some next tokens of a sequence, see `SequenceFeature.forces_tokens`; mostly no row has that
    """

    def __init__(self) -> None:
        self.version = 0  # changes whenever a sequence enters or leaves
        self.num_of_client = Counter[Client]()
        self.forced_by: dict[Sequence, SequenceFeature] = {}
        self._order = np.zeros(0, np.int64)  # the slots in the order of the queue
        self._in_order: list[Sequence] = []  # their sequences
        self._stop_counts = Counter[int]()  # how many rows a token ends
        self._free_slots: list[int] = []
        self._counts = np.zeros((9, 0), np.int64)
        self.seq_ids, self.sequences, self._outputs = np.zeros(0, np.uint64), *np.empty((2, 0), object)
        self._add_slots(_INITIAL_NUM_SLOTS)
        self._planned = self._look_up(self._order)  # all rows, as of the version that it names

    def __len__(self) -> int:
        return len(self._in_order)

    def enter(self, sequence: Sequence) -> None:
        """Gives a row to a sequence whose next token is the only one that is not computed."""
        assert sequence.num_tokens == sequence.num_computed_tokens + 1, "it needs a single token"
        if not self._free_slots:
            self._add_slots(len(self.seq_ids))
        slot = self._free_slots.pop()
        self.version += 1
        self.seq_ids[slot], self.sequences[slot] = sequence.seq_id, sequence
        self._outputs[slot] = sequence.output_token_ids
        self._counts[:, slot] = (
            self.version,
            sequence.num_computed_tokens,
            sequence.num_prompt_tokens + len(sequence.output_token_ids),
            sequence.max_num_cached_tokens,
            sequence.num_blocks,
            sequence.num_reserved_blocks,
            sequence.stream,
            sequence.cache_id,
            sequence.lane,
        )
        sequence.counts = RowCounts(self, slot)
        index = bisect.bisect(self._in_order, sequence.order, key=_order)
        self._in_order.insert(index, sequence)
        self._order = np.concatenate((self._order[:index], (slot,), self._order[index:]))
        self.num_of_client[sequence.spec.client_id] += 1
        self._stop_counts.update(sequence.spec.stop_token_ids)
        if (feature := sequence.forced_by) is not None:
            self.forced_by[sequence] = feature

    def leave(self, sequence: Sequence) -> None:
        """Takes the row away: the sequence has its counts itself again."""
        counts, slot = sequence.counts, sequence.slot
        assert slot is not None, "it has a row"
        sequence.counts = SequenceCounts(
            counts.num_computed_tokens, counts.num_pending_tokens, counts.num_blocks, counts.num_reserved_blocks
        )
        self.version += 1
        self.serials[slot] = 0
        self.sequences[slot] = self._outputs[slot] = None
        self._free_slots.append(slot)
        index = bisect.bisect_left(self._in_order, sequence.order, key=_order)
        assert self._in_order.pop(index) is sequence
        self._order = np.concatenate((self._order[:index], self._order[index + 1 :]))
        _subtract(self.num_of_client, sequence.spec.client_id)
        self.forced_by.pop(sequence, None)
        for token_id in sequence.spec.stop_token_ids:
            _subtract(self._stop_counts, token_id)

    def unfinished(self) -> np.ndarray:
        """The slots of the rows that need a further token, in the order of the queue: int64 [num_rows]."""
        slots = self._order
        is_unfinished = self.num_computed[slots] < self.ends[slots]
        return slots if np.count_nonzero(is_unfinished) == len(slots) else slots[is_unfinished]

    def lacks_block(self, slots: np.ndarray, block_size: int) -> np.ndarray:
        """Which rows have no block for their next token: bool [num_rows]."""
        return self.num_computed[slots] >= self.num_blocks[slots] * block_size

    def num_unreserved(self, slots: np.ndarray) -> int:
        """How many of these rows have no block reserved."""
        return len(slots) - np.count_nonzero(self.num_reserved[slots])

    def count_clients(self, slots: np.ndarray) -> Counter[Client]:
        """How many of these rows are of each client. Whoever calls this changes nothing in it."""
        if len(slots) == len(self):
            return self.num_of_client
        return Counter([each.spec.client_id for each in self.sequences[slots]])

    def by_cache(self, slots: np.ndarray, cache_ids: Collection[int]) -> list[tuple[int, np.ndarray]]:
        """These rows by the KV cache that they are in: int64 [num_rows] for each of `cache_ids`."""
        if len(cache_ids) == 1:
            [cache_id] = cache_ids
            return [(cache_id, slots)]
        return [(cache_id, slots[self.cache_ids[slots] == cache_id]) for cache_id in cache_ids]

    def of_lane(self, slots: np.ndarray, lane: int, num_lanes: int) -> np.ndarray:
        """Those of these rows that are in one of the lanes: int64 [num_rows]."""
        return slots if num_lanes == 1 else slots[self.lanes[slots] == lane]

    def grow(self, slots_by_cache: Iterable[tuple[int, np.ndarray]], ledgers: Mapping[int, BlockLedger]) -> None:
        """Takes a block for each of these rows, the reserved ones first. The ledgers, by cache_id, have as many."""
        for cache_id, own in slots_by_cache:
            ledger = ledgers[cache_id]
            reserved = own[self.num_reserved[own] > 0]
            ledger.unreserve(len(reserved))
            ledger.take(len(own))
            self.num_reserved[reserved] -= 1
            self.num_blocks[own] += 1

    def advance(self, slots: np.ndarray, has_grown: np.ndarray) -> Decodes:
        """Plans the next token of these rows, which have the blocks for it. has_grown: see `Decodes`"""
        positions = self.num_computed[slots]
        self.num_computed[slots] = positions + 1
        if slots is not self._order:
            return Decodes(self._look_up(slots), positions, has_grown)
        if self._planned.version != self.version:
            self._planned = self._look_up(slots)
        return Decodes(self._planned, positions, has_grown)

    def _look_up(self, slots: np.ndarray) -> PlannedRows:
        return PlannedRows(
            self.version,
            slots,
            self.serials[slots],
            self.seq_ids[slots],
            self.sequences[slots],
            self.streams[slots],
            self._outputs[slots].tolist(),
            np.ones(len(slots), np.int64),
        )

    def may_end(self, rows: PlannedRows, token_ids: np.ndarray, tokens: list[int]) -> np.ndarray:
        """Which rows have left since their step was planned, get their last token, or get one that ends some row.

        token_ids: int64 [num_rows], `tokens` as an array -> bool [num_rows]
        """
        found = self.num_known[rows.slots] >= self.ends[rows.slots]
        if rows.version != self.version:
            found |= self.serials[rows.slots] != rows.serials
        if not self._stop_counts.keys().isdisjoint(tokens):
            found |= np.isin(token_ids, list(self._stop_counts))
        return found

    def append(self, slots: np.ndarray, outputs: Iterable[list[int]], tokens: list[int]) -> None:
        """Appends a token to the output of each of these rows."""
        for output, token_id in zip(outputs, tokens, strict=True):
            output.append(token_id)
        self.num_known[slots] += 1

    def append_one(self, sequence: Sequence) -> None:
        """A token of a sequence that has a row becomes known; whoever calls this appends it to the output.

        The row stays: steps that have been planned already are of this row, and go on being handled with the others.
        """
        self.num_known[sequence.slot] += 1

    def _add_slots(self, num_new: int) -> None:
        num_old = len(self.seq_ids)
        self._free_slots.extend(reversed(range(num_old, num_old + num_new)))
        self._counts = np.pad(self._counts, ((0, 0), (0, num_new)))
        self.serials, self.num_computed, self.num_known, self.ends, *rest = self._counts
        self.num_blocks, self.num_reserved, self.streams, self.cache_ids, self.lanes = rest
        self.seq_ids = np.concatenate([self.seq_ids, np.zeros(num_new, np.uint64)])
        self.sequences, self._outputs = (
            np.concatenate([column, np.empty(num_new, object)]) for column in (self.sequences, self._outputs)
        )


def _order(sequence: Sequence) -> tuple[float, int]:
    return sequence.order


def _subtract(counts: Counter, key: object) -> None:
    counts[key] -= 1
    if not counts[key]:
        del counts[key]
