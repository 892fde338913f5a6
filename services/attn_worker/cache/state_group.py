"""`StateGroup`: the recurrent states of all sequences, and `StepStates`: those that a step reads and writes.

A state is what a sequence's first tokens have left in all these layers; it has a slot in the backend's memory. A step
reads one slot and writes another, so that a state never changes while somebody may still need it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from services.attn_worker.cache.block_pool import BlockPool
from services.attn_worker.cache.cached_sequence import CachedSequence, SequenceRows
from services.attn_worker.cache.group import Batch
from services.attn_worker.cache.step_metadata import StepMetadata
from services.common.errors import CapacityError


@dataclass(frozen=True, slots=True)
class StateWave:
    """Parts of a step's sequences that can run at once, one list element for each."""

    first_rows: list[int] = field(default_factory=list)  # of the step's rows, as in `StepMetadata`
    num_tokens: list[int] = field(default_factory=list)  # rows of the part
    sources: list[int] = field(default_factory=list)  # slot that holds the state before
    targets: list[int] = field(default_factory=list)  # slot for the state after

    def add(self, first_row: int, num_tokens: int, source: int, target: int) -> None:
        """Adds the part of a sequence."""
        self.first_rows.append(first_row)
        self.num_tokens.append(num_tokens)
        self.sources.append(source)
        self.targets.append(target)


@dataclass(frozen=True, slots=True)
class StepStates:
    """A step in recurrent layers: waves that run one after the other, all rows together.

    The first wave has a part of each sequence of the step. A later one starts from states that the wave before has
    written, for sequences that leave a state within their tokens.

    Two slots belong to no sequence. Slot `num_slots`, the null slot, takes what sequences that cannot run leave. Slot
    `num_slots + 1`, the zero slot, is the state before a first token, and is never written.
    """

    waves: tuple[StateWave, ...] = field(default_factory=lambda: (StateWave(),))


def null_slot(num_slots: int) -> int:
    """The slot that is written for nobody, of `num_slots` and two more."""
    return num_slots


def zero_slot(num_slots: int) -> int:
    """The slot that is always zero."""
    return num_slots + 1


@dataclass(slots=True, eq=False)
class _Checkpoint:
    """A state within a step's tokens, for the prefix cache alone."""

    row: int  # of its sequence
    length: int  # the tokens it is the state of, full blocks
    slot: int | None  # None: given up since


class StateGroup:
    """A `CacheGroup`: the states of each row, by their lengths in tokens; length 0 needs no slot.

    A row has the state of its last planned token, those that steps may still go back to, and the last one before what
    is committed. The slots are a `BlockPool`: forked sequences share them, and the state at the end of a block, a
    *checkpoint*, stays findable by the block's digest. If slots are short, checkpoints that no sequence has are given
    up first, then states before the committed ones, then those of orphans, then all but the last of each row. So two
    slots for each sequence of a plan are enough.
    """

    name = "states"
    window = None
    max_num_sequences = None  # the scheduler counts places, of which each has enough slots
    needs_every_block = False

    def __init__(self, num_slots: int, block_size: int) -> None:
        self.pool = BlockPool(num_slots)
        self._zero_slot = zero_slot(num_slots)
        self._block_size = block_size
        self._states: dict[int, dict[int, int]] = {}  # by row: slots by length, ascending
        self._wanted: dict[int, tuple[int, ...]] = {}  # by row: the lengths of checkpoints to stay, ascending
        self._taken: dict[int, int] = {}  # by row: the slot for the state that the step being planned leaves
        self._steps: deque[list[_Checkpoint]] = deque()  # of steps that are not committed, the oldest first
        self._checkpoints: list[_Checkpoint] = []  # of all these steps, those that have a slot
        self._moving: dict[int, bytes] = {}  # by row: the digest of its checkpoint that the next one replaces

    def add_rows(self, num_new: int) -> None:
        """Nothing: a row without states has no memory."""

    def free_row(self, row: int) -> int:
        num_freed = self.truncate(row, 0, 0)
        for table in (self._states, self._wanted, self._moving):
            table.pop(row, None)
        return num_freed

    # A new sequence

    def open_extra_rows(self, row: int, key: bytes, num_rows: int) -> bool:
        """These layers read none."""
        return True

    def match(self, digests: Sequence[bytes]) -> int:
        """A sequence can continue only after a block whose end has a checkpoint."""
        num_blocks = len(digests)
        while num_blocks and self.pool.lookup(digests[num_blocks - 1]) is None:
            num_blocks -= 1
        return num_blocks

    def adopt(self, row: int, digests: Sequence[bytes], num_offered: int, num_tokens: int) -> int:
        """Its step that crosses the last full block before its last token will make a checkpoint there.

        And one where the blocks of the other layers end, because others will probably have these blocks, too.
        """
        num_pinned = 0
        if digests:
            slot = self.pool.lookup(digests[-1])
            assert slot is not None, "it was found before"
            num_pinned = int(self.pool.pin(slot))
            self._states[row] = {len(digests) * self._block_size: slot}
        ends = {num_offered * self._block_size, (num_tokens - 1) // self._block_size * self._block_size}
        self._wanted[row] = tuple(sorted(end for end in ends if end > len(digests) * self._block_size))
        return num_pinned

    def register(self, row: int, digests: Sequence[bytes], first: int) -> None:
        """The states of a row at the ends of blocks. Of those that no prompt ends with, only the last one stays."""
        for length, slot in self._states.get(row, {}).items():
            num_blocks, offset = divmod(length, self._block_size)
            if offset or num_blocks > len(digests):
                continue
            digest = digests[num_blocks - 1]
            if self.pool.lookup(digest) is not None:
                continue
            self.pool.register_hash(slot, digest)
            if length not in self._wanted.get(row, ()):
                if row in self._moving:
                    self.pool.discard(self._moving[row])
                self._moving[row] = digest

    def num_to_fork(self, position: int) -> int:
        return 0

    def fork(self, row: int, other_row: int, position: int) -> list[tuple[int, int]]:
        """Both rows share the states: a step never overwrites the one that it reads."""
        states = {length: slot for length, slot in self._states[row].items() if length <= position}
        for slot in states.values():
            self.pool.pin(slot)
        self._states[other_row] = states
        return []

    # Going back

    def lack_at(self, row: int, position: int) -> str | None:
        return None if self._has(row, position) else "it has no state there"

    def is_shared(self, row: int, position: int) -> bool:
        return False

    def kept_length(self, row: int, length: int, num_hashed_blocks: int) -> int | None:
        return next((each for each in reversed(self._states.get(row, {})) if each <= length), None if length else 0)

    def go_back(self, row: int, position: int, num_hashed_blocks: int) -> None:
        self.truncate(row, position, num_hashed_blocks)

    def truncate(self, row: int, length: int, num_hashed_blocks: int) -> int:
        return self._release(row, [each for each in self._states.get(row, ()) if each > length])

    # A step

    def plan_extra_rows(self, row: int, num_rows: int, orphans: Iterable[int]) -> None:
        """Nothing: these layers read none."""

    def evict(self, rows: SequenceRows) -> None:
        """Nothing: `commit` releases the states that no step goes back to."""

    def evict_before(self, row: int, position: int) -> int:
        return 0

    def lacking(self, batch_rows: np.ndarray, positions: np.ndarray) -> Iterable[int]:
        pairs = zip(batch_rows.tolist(), positions.tolist(), strict=True)
        return [index for index, (row, position) in enumerate(pairs) if not self._has(row, position)]

    def num_missing(self, batch_rows: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """One for each: a step leaves its state in a slot of its own."""
        return np.ones(len(batch_rows), np.int64)

    def make_room(self, num_blocks: int, rows: SequenceRows, orphans: Iterable[int]) -> None:
        """Gives up states until so many slots are free."""
        while self._checkpoints and self.pool.num_free_blocks < num_blocks:
            self._drop(self._checkpoints[:1])
        if self.pool.num_free_blocks >= num_blocks:
            return
        for row, lengths in self._given_up(rows.num_committed, orphans):
            if self.pool.num_free_blocks >= num_blocks:
                return
            self._release(row, lengths)
        if self.pool.num_free_blocks < num_blocks:
            raise CapacityError(f"a sequence needs a slot for its state, all {self.pool.num_blocks} are in use")

    def take(self, row: int, num_blocks: int) -> None:
        [self._taken[row]] = self.pool.allocate(num_blocks)

    def describe(self, batch: Batch, rows: SequenceRows, metadata: StepMetadata | None) -> StepMetadata:
        """The states that a step reads and writes, and those within its tokens that it leaves as checkpoints."""
        assert metadata is not None, "layers with blocks come first"
        waves, checkpoints, first_row = [StateWave()], list[_Checkpoint](), 0
        columns = (batch.rows, batch.positions, batch.num_tokens, batch.has_failed)
        for row, position, count, has_failed in zip(*(column.tolist() for column in columns), strict=True):
            if has_failed:
                waves[0].add(first_row, count, self._zero_slot, null_slot(self.pool.num_blocks))
                first_row += count
                continue
            end, slot = position + count, self._taken.pop(row)
            source = self._states[row][position] if position else self._zero_slot
            parts = [*self._cut(row, position, end, checkpoints), (end, slot)]
            for index, (part_end, target) in enumerate(parts):
                if index == len(waves):
                    waves.append(StateWave())
                waves[index].add(first_row, part_end - position, source, target)
                first_row, position, source = first_row + part_end - position, part_end, target
            self._states.setdefault(row, {})[end] = slot
        self._steps.append(checkpoints)
        return metadata.with_other(StepStates(tuple(waves)))

    def commit(self, step_rows: Sequence[int], rows: SequenceRows, sequences: Mapping[int, CachedSequence]) -> None:
        """Makes the step's checkpoints findable, and releases states that its sequences need no more.

        These are all before the committed length, except the last of them: clients may not know the last token yet.
        """
        for checkpoint in self._steps.popleft():
            num_blocks = checkpoint.length // self._block_size
            if checkpoint.row in step_rows and checkpoint.slot is not None:
                digests = sequences[checkpoint.row].digests
                if num_blocks <= len(digests):
                    self.pool.register_hash(checkpoint.slot, digests[num_blocks - 1])
            self._drop([checkpoint])
        for row in step_rows:
            earlier = [length for length in self._states[row] if length < rows.num_committed[row]]
            self._release(row, earlier[:-1])

    def abort(self) -> None:
        for checkpoints in self._steps:
            self._drop(checkpoints)
        self._steps.clear()

    def check_integrity(self, sequences: Mapping[int, CachedSequence], rows: SequenceRows) -> None:
        assert self._checkpoints == [each for step in self._steps for each in step if each.slot is not None]
        assert not self._taken
        ref_counts = [0] * self.pool.num_blocks
        for slot in [slot for states in self._states.values() for slot in states.values()]:
            ref_counts[slot] += 1
        for checkpoint in self._checkpoints:
            ref_counts[checkpoint.slot] += 1
        self.pool.check_integrity(ref_counts)
        for row, states in self._states.items():
            assert not states or row in sequences
            assert list(states) == sorted(states) and all(0 < length <= rows.num_computed[row] for length in states)
        for row, sequence in sequences.items():
            assert sequence.is_orphan or self._has(row, int(rows.num_computed[row]))
        assert {*self._wanted, *self._moving} <= sequences.keys()

    def _has(self, row: int, length: int) -> bool:
        return not length or length in self._states.get(row, ())

    def _drop(self, checkpoints: Iterable[_Checkpoint]) -> None:
        """Releases the slots of checkpoints of steps that are not committed, or no more."""
        for checkpoint in checkpoints:
            if checkpoint.slot is not None:
                self.pool.release([checkpoint.slot])
                self._checkpoints.remove(checkpoint)
                checkpoint.slot = None

    def _cut(self, row: int, position: int, end: int, checkpoints: list[_Checkpoint]) -> Iterator[tuple[int, int]]:
        """The lengths within a row's step at which it makes checkpoints, with their slots, as far as there are any."""
        for length in self._wanted.get(row, ()):
            if position < length < end and self.pool.num_free_blocks:
                [slot] = self.pool.allocate(1)
                checkpoints.append(_Checkpoint(row, length, slot))
                self._checkpoints.append(checkpoints[-1])
                yield length, slot

    def _given_up(self, num_committed: np.ndarray, orphans: Iterable[int]) -> Iterator[tuple[int, list[int]]]:
        """Rows with the lengths of states that can be given up, the least useful ones first."""
        for row, states in self._states.items():
            yield row, [length for length in states if length < min(num_committed[row], max(states))]
        for row in orphans:
            yield row, list(self._states.get(row, ()))
        for row, states in self._states.items():
            yield row, list(states)[:-1]

    def _release(self, row: int, lengths: Sequence[int]) -> int:
        """Releases the states of these lengths; returns how many slots became free."""
        states = self._states.get(row, {})
        return self.pool.release([states.pop(length) for length in lengths])
