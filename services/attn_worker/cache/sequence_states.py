"""`SequenceStates`: the recurrent states of all sequences, for models with gated delta layers. Part of the KV cache.

A state is what a sequence's first tokens have left in all these layers; it has a slot in the backend's memory. A step
reads one slot and writes another, so that a state never changes while somebody may still need it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from services.attn_worker.cache.block_pool import BlockPool
from services.attn_worker.cache.cached_sequence import CachedSequence, Checkpoint, InFlight
from services.attn_worker.runner.step_states import StateWave, StepStates, null_slot, zero_slot
from services.common.errors import CapacityError, RequestAborted, TwostrokeError


class SequenceStates:
    """The states of each row of `SequenceRows`, by their lengths in tokens; length 0 needs no slot.

    A row has the state of its last planned token, those that steps may still go back to, and the last one before what
    is committed. The slots are a `BlockPool`: forked sequences share them, and the state at the end of a block, a
    *checkpoint*, stays findable by the block's digest. If slots are short, checkpoints that no sequence has are given
    up first, then states before the committed ones, then those of orphans, then all but the last of each row. So two
    slots for each sequence of a plan are enough.
    """

    def __init__(self, num_slots: int, block_size: int) -> None:
        self.pool = BlockPool(num_slots)
        self._zero_slot = zero_slot(num_slots)
        self._block_size = block_size
        self._states: dict[int, dict[int, int]] = {}  # by row: slots by length, ascending
        self._wanted: dict[int, tuple[int, ...]] = {}  # by row: the lengths of checkpoints to stay, ascending
        self._checkpoints: list[Checkpoint] = []  # of steps that are not committed
        self._moving: dict[int, bytes] = {}  # by row: the digest of its checkpoint that the next one replaces

    def has(self, row: int, length: int) -> bool:
        """Whether a row can go on from this length."""
        return not length or length in self._states.get(row, ())

    def lengths(self, row: int, most: int) -> Iterator[int]:
        """The lengths up to `most` that a row can go on from, greatest first. 0 only if it has no committed token."""
        yield from (length for length in reversed(self._states.get(row, {})) if length <= most)
        if most == 0:
            yield 0

    def open(self, row: int, num_tokens: int, digests: list[bytes]) -> int:
        """Gives a new row its last checkpoint among the blocks that were found; returns how many blocks lie before it.

        `num_tokens`: of the sequence. Its step that crosses the last full block before its last token will make a
        checkpoint there, and one where the blocks found end, because others will probably have these blocks, too.
        """
        num_kept = len(digests)
        while num_kept and self.pool.lookup(digests[num_kept - 1]) is None:
            num_kept -= 1
        if num_kept:
            slot = self.pool.lookup(digests[num_kept - 1])
            assert slot is not None, "it was found before"
            self.pool.pin(slot)
            self._states[row] = {num_kept * self._block_size: slot}
        ends = {len(digests) * self._block_size, (num_tokens - 1) // self._block_size * self._block_size}
        self._wanted[row] = tuple(sorted(end for end in ends if end > num_kept * self._block_size))
        return num_kept

    def free(self, row: int) -> None:
        """Releases all states of a row. Its checkpoints stay findable."""
        self.truncate(row, 0)
        for table in (self._states, self._wanted, self._moving):
            table.pop(row, None)

    def truncate(self, row: int, num_tokens: int) -> None:
        """Releases the states beyond a length."""
        self._release(row, [length for length in self._states.get(row, ()) if length > num_tokens])

    def fork(self, row: int, other_row: int, position: int) -> None:
        """Shares the states up to `position`, where there must be one, with an empty row."""
        assert self.has(row, position)
        states = {length: slot for length, slot in self._states[row].items() if length <= position}
        for slot in states.values():
            self.pool.pin(slot)
        self._states[other_row] = states

    def take(
        self,
        seq_ids: Sequence[int],
        rows: np.ndarray,
        positions: np.ndarray,
        num_committed: np.ndarray,  # int64, of each row
        orphans: Iterable[CachedSequence],  # read only if slots are short
        errors: dict[int, TwostrokeError],
    ) -> list[int | None]:
        """A slot for the state that each entry of a plan leaves; None for those with errors, to which it may add."""
        slots: list[int | None] = []
        in_plan = set(rows.tolist())
        for seq_id, row, position in zip(seq_ids, rows.tolist(), positions.tolist(), strict=True):
            slots.append(None)
            if seq_id in errors:
                continue
            if not self.has(row, position):
                errors[seq_id] = RequestAborted(f"sequence {seq_id} has no state of its first {position} tokens")
                continue
            try:
                self._make_room(num_committed, (each.row for each in orphans if each.row not in in_plan))
                slots[-1] = self.pool.allocate(1)[0]
            except CapacityError as error:
                errors[seq_id] = error
        return slots

    def begin_step(
        self,
        rows: np.ndarray,
        positions: np.ndarray,
        num_tokens: np.ndarray,
        slots: Sequence[int | None],  # by `take`
        has_failed: np.ndarray,  # of entries that cannot run
    ) -> tuple[StepStates, list[Checkpoint]]:
        """The states that a step reads and writes, and those of them that are within its tokens."""
        waves, checkpoints, first_row = [StateWave()], list[Checkpoint](), 0
        entries = zip(rows.tolist(), positions.tolist(), num_tokens.tolist(), slots, has_failed.tolist(), strict=True)
        for row, position, count, slot, is_failed in entries:
            if is_failed:
                self.pool.release([] if slot is None else [slot])
                waves[0].add(first_row, count, self._zero_slot, null_slot(self.pool.num_blocks))
                first_row += count
                continue
            assert slot is not None
            end = position + count
            source = self._states[row][position] if position else self._zero_slot
            parts = [*self._cut(row, position, end, checkpoints), (end, slot)]
            for index, (part_end, target) in enumerate(parts):
                if index == len(waves):
                    waves.append(StateWave())
                waves[index].add(first_row, part_end - position, source, target)
                first_row, position, source = first_row + part_end - position, part_end, target
            self._states.setdefault(row, {})[end] = slot
        return StepStates(tuple(waves)), checkpoints

    def commit(self, step: InFlight, sequence_of_row: Mapping[int, CachedSequence], num_committed: np.ndarray) -> None:
        """Makes the checkpoints of a committed step findable, and releases states that its sequences need no more.

        These are all before the committed length, except the last of them: clients may not know the last token yet.
        """
        for checkpoint in step.checkpoints:
            sequence = sequence_of_row.get(checkpoint.row)
            num_blocks = checkpoint.length // self._block_size
            if sequence in step.sequences and num_blocks <= len(sequence.digests) and checkpoint.slot is not None:
                self.pool.register_hash(checkpoint.slot, sequence.digests[num_blocks - 1])
            self.drop([checkpoint])
        for sequence in step.sequences:
            row = sequence.row
            if sequence_of_row.get(row) is sequence:
                earlier = [length for length in self._states[row] if length < num_committed[row]]
                self._release(row, earlier[:-1])

    def register(self, row: int, digests: Sequence[bytes]) -> None:
        """Makes the states of a row at the ends of blocks findable, if these have digests, as committed ones do.

        Of those that no prompt ends with, only the last one stays.
        """
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

    def drop(self, checkpoints: Iterable[Checkpoint]) -> None:
        """Releases the slots of checkpoints of steps that are not committed, or no more."""
        for checkpoint in checkpoints:
            if checkpoint.slot is not None:
                self.pool.release([checkpoint.slot])
                self._checkpoints.remove(checkpoint)
                checkpoint.slot = None

    def check_integrity(self, lengths: dict[int, int], checkpoints: Sequence[Checkpoint]) -> None:
        """Counts everything again; raises AssertionError on any disagreement.

        `lengths`: those of all rows, by row; `checkpoints`: of the steps that are not committed.
        """
        assert self._checkpoints == [each for each in checkpoints if each.slot is not None]
        ref_counts = [0] * self.pool.num_blocks
        for slot in [slot for states in self._states.values() for slot in states.values()]:
            ref_counts[slot] += 1
        for checkpoint in self._checkpoints:
            ref_counts[checkpoint.slot] += 1
        self.pool.check_integrity(ref_counts)
        for row, states in self._states.items():
            assert not states or row in lengths
            assert list(states) == sorted(states) and all(0 < length <= lengths[row] for length in states)
        assert {*self._wanted, *self._moving} <= lengths.keys()

    def _cut(self, row: int, position: int, end: int, checkpoints: list[Checkpoint]) -> Iterator[tuple[int, int]]:
        """The lengths within a row's step at which it makes checkpoints, with their slots, as far as there are any."""
        for length in self._wanted.get(row, ()):
            if position < length < end and self.pool.num_free_blocks:
                [slot] = self.pool.allocate(1)
                checkpoints.append(Checkpoint(row, length, slot))
                self._checkpoints.append(checkpoints[-1])
                yield length, slot

    def _make_room(self, num_committed: np.ndarray, orphans: Iterable[int]) -> None:
        """Gives up states until a slot is free. Raises CapacityError if there are none to give up."""
        while self._checkpoints and not self.pool.num_free_blocks:
            self.drop(self._checkpoints[:1])
        for row, lengths in self._given_up(num_committed, orphans):
            if self.pool.num_free_blocks:
                return
            self._release(row, lengths)
        if not self.pool.num_free_blocks:
            raise CapacityError(f"a sequence needs a slot for its state, all {self.pool.num_blocks} are in use")

    def _given_up(self, num_committed: np.ndarray, orphans: Iterable[int]) -> Iterator[tuple[int, list[int]]]:
        """Rows with the lengths of states that can be given up, the least useful ones first."""
        for row, states in self._states.items():
            yield row, [length for length in states if length < min(num_committed[row], max(states))]
        for row in orphans:
            yield row, list(self._states.get(row, ()))
        for row, states in self._states.items():
            yield row, list(states)[:-1]

    def _release(self, row: int, lengths: Sequence[int]) -> None:
        states = self._states.get(row, {})
        self.pool.release([states.pop(length) for length in lengths])
