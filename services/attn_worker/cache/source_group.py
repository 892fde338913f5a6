"""`SourceGroup`: keys and values of encoders' outputs, which the cross attention of all sequences reads.

They are written once, before the first step of the first sequence that reads them, and never change. So sequences with
equal inputs share them, and one that comes later finds them while nobody else needs their slot.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from services.attn_worker.cache.block_pool import BlockPool
from services.attn_worker.cache.cached_sequence import CachedSequence, SequenceRows
from services.attn_worker.cache.group import Batch
from services.attn_worker.cache.step_metadata import StepMetadata
from services.common.errors import CapacityError, InvalidRequest


def _no_slots() -> np.ndarray:
    return np.zeros(0, np.int64)


@dataclass(frozen=True, slots=True)
class StepSources:
    """A step in layers with cross attention. One slot, the null slot, belongs to no sequence: `num_slots`.

    Before its layers run, the step writes some slots; `writes` are in the order in which the rows come.
    """

    slots: np.ndarray = field(default_factory=_no_slots)  # int64 [num_seqs]; the null slot for those that cannot run
    lengths: np.ndarray = field(default_factory=_no_slots)  # int64 [num_seqs], rows of it that are read; at least 1
    writes: tuple[tuple[int, int], ...] = ()  # (slot, number of rows); the null slot: nobody reads them


@dataclass(slots=True)
class _Source:
    """What a row reads."""

    key: bytes  # equal for equal inputs, weights and salts
    length: int  # rows of the encoder's output
    slot: int | None = None  # None: nobody has written it yet, or it was given up


class SourceGroup:
    """A `CacheGroup` whose pool has a slot for each output; it does not grow with the tokens of its sequences.

    A slot becomes findable when the step that writes it is committed. If there is no free slot, those of orphans are
    given up; a dense worker has no more sequences than there are slots (`max_num_sequences`).
    """

    name = "sources"
    window = None
    needs_every_block = False

    def __init__(self, num_slots: int, max_source_len: int) -> None:
        self.pool = BlockPool(num_slots)
        self.max_num_sequences = num_slots
        self.max_source_len = max_source_len
        self._sources: dict[int, _Source] = {}  # by row
        self._writing: dict[bytes, int] = {}  # by key: slots that planned steps write
        self._planned: list[tuple[bytes, int, int]] = []  # (key, slot, length) of the step that is being planned
        self._steps: deque[list[tuple[bytes, int, int]]] = deque()  # of steps that are not committed, oldest first

    @property
    def null_slot(self) -> int:
        """The slot that is written and read for nobody."""
        return self.pool.num_blocks

    def add_rows(self, num_new: int) -> None:
        """Nothing: an empty row has no memory."""

    def free_row(self, row: int) -> int:
        source = self._sources.pop(row, None)
        return 0 if source is None else self._release(source)

    # A new sequence

    def open_extra_rows(self, row: int, key: bytes, num_rows: int) -> bool:
        if not 1 <= num_rows <= self.max_source_len:
            raise InvalidRequest(f"the encoder's input has {num_rows} rows, 1 to {self.max_source_len} are possible")
        source = self._sources.setdefault(row, _Source(key, num_rows))
        self._find(source)
        return source.slot is not None and self.pool.lookup(key) == source.slot

    def match(self, digests: Sequence[bytes]) -> int:
        """All: a sequence can continue after any of its tokens."""
        return len(digests)

    def adopt(self, row: int, digests: Sequence[bytes], num_offered: int, num_tokens: int) -> int:
        """Nothing: `open_extra_rows` does it."""
        return 0

    def register(self, row: int, digests: Sequence[bytes], first: int) -> None:
        """Nothing: what a row reads is findable by its own key."""

    def num_to_fork(self, position: int) -> int:
        return 0

    def fork(self, row: int, other_row: int, position: int) -> list[tuple[int, int]]:
        """Both rows share the slot."""
        source = self._sources[row]
        assert source.slot is not None, "`lack_at` has said so otherwise"
        self.pool.pin(source.slot)
        self._sources[other_row] = replace(source)
        return []

    # Going back

    def lack_at(self, row: int, position: int) -> str | None:
        source = self._sources.get(row)
        if source is not None and source.slot is not None:
            return None
        return "the output of its encoder has not been written"

    def is_shared(self, row: int, position: int) -> bool:
        return False

    def kept_length(self, row: int, length: int, num_hashed_blocks: int) -> int | None:
        return None if length and self.lack_at(row, length) is not None else length

    def go_back(self, row: int, position: int, num_hashed_blocks: int) -> None:
        """Nothing: it does not depend on the row's tokens."""

    def truncate(self, row: int, length: int, num_hashed_blocks: int) -> int:
        return 0

    # A step

    def plan_extra_rows(self, row: int, num_rows: int, orphans: Iterable[int]) -> None:
        source = self._sources.get(row)
        slot = self.null_slot
        try:
            if source is not None and source.length != num_rows:
                raise InvalidRequest(f"a step writes {num_rows} rows of an encoder's output, it has {source.length}")
            if source is not None:
                slot = self._slot_to_write(source, orphans)
        finally:  # the rows come in any case
            self._planned.append((b"" if source is None else source.key, slot, num_rows))

    def evict(self, rows: SequenceRows) -> None:
        """Nothing: a row reads its slot as long as it is open."""

    def evict_before(self, row: int, position: int) -> int:
        return 0

    def lacking(self, batch_rows: np.ndarray, positions: np.ndarray) -> Iterable[int]:
        """Those whose slot nobody has written or is to write."""
        found = []
        for index, row in enumerate(batch_rows.tolist()):
            source = self._sources.get(row)
            if source is not None and source.slot is None:
                self._find(source)
            if source is None or source.slot is None:
                found.append(index)
        return found

    def num_missing(self, batch_rows: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        return np.zeros(len(batch_rows), np.int64)

    def make_room(self, num_blocks: int, rows: SequenceRows, orphans: Iterable[int]) -> None:
        """Nothing: `plan_extra_rows` does it."""

    def take(self, row: int, num_blocks: int) -> None:
        raise AssertionError("no sequence lacks blocks of it")

    def describe(self, batch: Batch, rows: SequenceRows, metadata: StepMetadata | None) -> StepMetadata:
        assert metadata is not None, "layers with keys of tokens come first"
        slots, lengths = np.full(len(batch.rows), self.null_slot, np.int64), np.ones(len(batch.rows), np.int64)
        for index in np.flatnonzero(~batch.has_failed).tolist():
            source = self._sources[int(batch.rows[index])]
            assert source.slot is not None, "it would have failed"
            slots[index], lengths[index] = source.slot, source.length
        planned, self._planned = self._planned, []
        self._steps.append(planned)
        writes = tuple((slot, length) for _, slot, length in planned)
        return metadata.with_other(StepSources(slots, lengths, writes))

    def commit(self, step_rows: Sequence[int], rows: SequenceRows, sequences: Mapping[int, CachedSequence]) -> None:
        """What the step has written becomes findable, if anybody still has it."""
        for key, slot, _ in self._steps.popleft():
            if self._writing.get(key) == slot:
                del self._writing[key]
                self.pool.register_hash(slot, key)

    def abort(self) -> None:
        """What was not written to its end is given up; the sequences that wait for it begin anew."""
        unwritten = set(self._writing.values())
        for source in self._sources.values():
            if source.slot in unwritten:
                self._release(source)
        assert not self._writing, "somebody had each of them"
        self._steps.clear()
        self._planned.clear()

    def check_integrity(self, sequences: Mapping[int, CachedSequence], rows: SequenceRows) -> None:
        ref_counts = [0] * self.pool.num_blocks
        assert self._sources.keys() <= sequences.keys() and not self._planned
        for source in self._sources.values():
            if source.slot is not None:
                ref_counts[source.slot] += 1
                assert source.slot in (self.pool.lookup(source.key), self._writing.get(source.key))
        self.pool.check_integrity(ref_counts)

    def _find(self, source: _Source) -> None:
        """Gives a source that has no slot the one with its content, if it is there or is to be written."""
        if source.slot is not None:
            return
        slot = self.pool.lookup(source.key)
        if slot is None:
            slot = self._writing.get(source.key)
        if slot is not None:
            self.pool.pin(slot)
            source.slot = slot

    def _slot_to_write(self, source: _Source, orphans: Iterable[int]) -> int:
        self._find(source)
        if source.slot is not None:
            return source.slot  # it gets the same content again
        for row in orphans:
            if self.pool.num_free_blocks:
                break
            if (orphan := self._sources.get(row)) is not None:
                self._release(orphan)
        if not self.pool.num_free_blocks:
            raise CapacityError(
                f"the output of an encoder needs a slot of the KV cache, all {self.pool.num_blocks} are in use"
            )
        [source.slot] = self.pool.allocate(1)
        self._writing[source.key] = source.slot
        return source.slot

    def _release(self, source: _Source) -> int:
        """Takes its slot from a source; returns how many became free."""
        if source.slot is None:
            return 0
        slot, source.slot = source.slot, None
        num_freed = self.pool.release([slot])
        if num_freed and self._writing.get(source.key) == slot:
            del self._writing[source.key]
        return num_freed
