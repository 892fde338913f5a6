"""`BlockGroup`: blocks of keys and values, as rows of numpy arrays. `WindowGroup`: those of layers with a window."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from services.attn_worker.cache.block_pool import BlockPool
from services.attn_worker.cache.cached_sequence import CachedSequence, SequenceRows
from services.attn_worker.cache.group import Batch
from services.attn_worker.cache.step_metadata import StepMetadata, build_step_metadata
from services.attn_worker.cache.tiers.tier import MissingBlock
from services.common.kv_cache.sliding_window import SlidingWindow


class BlockGroup:
    """A `CacheGroup`: a pool of blocks, and a table of them for each row.

    The arrays are replaced when rows are added, so read them by name each time. An unused element of a table names the
    null block, whose index is the pool's number of blocks. A row from which blocks were evicted continues at their
    place with those behind them. `sliding_window` says which blocks these are; they are evicted when a plan says so.
    """

    name = "blocks"

    def __init__(
        self,
        num_blocks: int,
        sliding_window: SlidingWindow,
        max_num_blocks: int,
        make_pool: Callable[[int], BlockPool] = BlockPool,
    ) -> None:
        """`max_num_blocks`: of one sequence."""
        self.pool = make_pool(num_blocks)
        self.sliding_window = sliding_window
        self.window = sliding_window.window
        self.null_block = num_blocks
        self.needs_every_block = sliding_window.window is None
        self.max_num_sequences = None
        self._block_size = sliding_window.block_size
        self._num_sink_blocks = sliding_window.num_sink_blocks
        self.block_ids = np.empty((0, max_num_blocks), np.int32)
        self.num_held_blocks = np.zeros(0, np.int64)
        self.num_evicted_blocks = np.zeros(0, np.int64)

    def add_rows(self, num_new: int) -> None:
        self.block_ids = np.pad(self.block_ids, ((0, num_new), (0, 0)), constant_values=self.null_block)
        self.num_held_blocks = np.pad(self.num_held_blocks, (0, num_new))
        self.num_evicted_blocks = np.pad(self.num_evicted_blocks, (0, num_new))

    def free_row(self, row: int) -> int:
        num_freed = self._release(row, first=0)
        self.num_evicted_blocks[row] = 0
        return num_freed

    # A new sequence

    def open_extra_rows(self, row: int, key: bytes, num_rows: int) -> bool:
        """These layers read none."""
        return True

    def match(self, digests: Sequence[bytes]) -> int:
        """Without a window, all of them, which have been looked up already (`needs_every_block`).

        With one, blocks that the next token does not read need not be findable: only those of sinks and of its window.
        """
        if self.needs_every_block:
            return len(digests)
        pool, sliding_window = self.pool, self.sliding_window
        num_sinks = 0  # leading blocks that are findable, up to those of all sinks
        while num_sinks < sliding_window.num_sink_blocks and num_sinks < len(digests):
            if pool.lookup(digests[num_sinks]) is None:
                return num_sinks
            num_sinks += 1
        end = len(digests)
        first = num_sinks + sliding_window.num_unread_blocks(end * self._block_size)
        for index in range(len(digests) - 1, num_sinks - 1, -1):
            if pool.lookup(digests[index]) is None:
                end = index
                first = num_sinks + sliding_window.num_unread_blocks(end * self._block_size)
            elif index <= first:
                return end
        return num_sinks

    def adopt(self, row: int, digests: Sequence[bytes], num_offered: int, num_tokens: int) -> int:
        num_pinned = 0
        num_evicted = self.sliding_window.num_unread_blocks(len(digests) * self._block_size)
        kept = [*digests[: self._num_sink_blocks], *digests[self._num_sink_blocks + num_evicted :]]
        for place, digest in enumerate(kept):
            block_id = self.pool.lookup(digest)
            assert block_id is not None, "it was found before"
            num_pinned += self.pool.pin(block_id)
            self.block_ids[row, place] = block_id
        self.num_evicted_blocks[row], self.num_held_blocks[row] = num_evicted, len(kept)
        return num_pinned

    def extend(self, row: int, digests: Sequence[bytes]) -> tuple[int, tuple[MissingBlock, ...]]:
        """Gives a row, of a group without a window, the blocks of further digests: findable ones, and new ones.

        There is room for all. Returns how many left the free ones, and the new ones, which have no content yet.
        """
        found = [self.pool.lookup(digest) for digest in digests]
        num_taken = sum(self.pool.pin(block_id) for block_id in found if block_id is not None)
        absent = [digest for digest, block_id in zip(digests, found, strict=True) if block_id is None]
        missing = tuple(zip(absent, self.pool.allocate(len(absent)), strict=True))
        new = iter(missing)
        first = int(self.num_held_blocks[row])
        for place, block_id in enumerate(found, start=first):
            self.block_ids[row, place] = next(new)[1] if block_id is None else block_id
        self.num_held_blocks[row] = first + len(digests)
        return num_taken + len(missing), missing

    def register(self, row: int, digests: Sequence[bytes], first: int) -> None:
        num_sinks, num_evicted = self._num_sink_blocks, int(self.num_evicted_blocks[row])
        for index in range(first, len(digests)):
            if index < num_sinks:
                self.pool.register_hash(int(self.block_ids[row, index]), digests[index])
            elif index >= num_sinks + num_evicted:
                self.pool.register_hash(int(self.block_ids[row, index - num_evicted]), digests[index])

    def num_to_fork(self, position: int) -> int:
        return int(position % self._block_size > 0)

    def fork(self, row: int, other_row: int, position: int) -> list[tuple[int, int]]:
        """Both rows share the full blocks; of a last, partial one the other row gets a copy."""
        num_full, num_left = divmod(position, self._block_size)
        num_shared = self._place(row, num_full)
        self.block_ids[other_row, :num_shared] = self.block_ids[row, :num_shared]
        self.num_held_blocks[other_row] = num_shared
        self.num_evicted_blocks[other_row] = self.num_evicted_blocks[row]
        for block_id in self.block_ids[row, :num_shared].tolist():
            self.pool.pin(block_id)
        if not num_left:
            return []
        self.take(other_row, 1)
        return [(int(self.block_ids[row, num_shared]), int(self.block_ids[other_row, num_shared]))]

    # Going back

    def lack_at(self, row: int, position: int) -> str | None:
        num_evicted = int(self.num_evicted_blocks[row])
        if num_evicted <= self.sliding_window.num_unread_blocks(position):
            return None
        return f"it has dropped {num_evicted * self._block_size} tokens that are read from there"

    def is_shared(self, row: int, position: int) -> bool:
        return self._shares(row, position // self._block_size, None)

    def kept_length(self, row: int, length: int, num_hashed_blocks: int) -> int | None:
        """The block that is written next must be neither findable nor shared.

        If others share it, the whole block is given up: recomputing a few tokens is cheaper than copying a block in
        every layer.
        """
        index, offset = divmod(length, self._block_size)
        if offset and index < num_hashed_blocks and self._shares(row, index, index + 1):
            length -= offset
        return length if self.lack_at(row, length) is None else None

    def go_back(self, row: int, position: int, num_hashed_blocks: int) -> None:
        self._unregister(row, position // self._block_size, num_hashed_blocks)

    def truncate(self, row: int, length: int, num_hashed_blocks: int) -> int:
        num_blocks = -(-length // self._block_size)
        self._unregister(row, length // self._block_size, min(num_blocks, num_hashed_blocks))
        return self._release(row, self._place(row, num_blocks))

    # A step

    def plan_extra_rows(self, row: int, num_rows: int, orphans: Iterable[int]) -> None:
        """Nothing: these layers read none."""

    def evict(self, rows: SequenceRows) -> None:
        """Nothing: the scheduler counts these blocks, so a plan says when (`evict_before`)."""

    def evict_before(self, row: int, position: int) -> int:
        return self._evict(row, self.sliding_window.num_evicted_blocks(position) - int(self.num_evicted_blocks[row]))

    def lacking(self, batch_rows: np.ndarray, positions: np.ndarray) -> Iterable[int]:
        """None: only what no token behind a row's committed ones reads is ever evicted."""
        return ()

    def num_missing(self, batch_rows: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        num_missing = -(-lengths // self._block_size) - self.num_held_blocks[batch_rows]
        return num_missing if self.needs_every_block else num_missing - self.num_evicted_blocks[batch_rows]

    def make_room(self, num_blocks: int, rows: SequenceRows, orphans: Iterable[int]) -> None:
        self.pool.check_room(num_blocks)

    def take(self, row: int, num_blocks: int) -> None:
        first = self.num_held_blocks[row]
        self.block_ids[row, first : first + num_blocks] = self.pool.allocate(num_blocks)
        self.num_held_blocks[row] += num_blocks

    def describe(self, batch: Batch, rows: SequenceRows, metadata: StepMetadata | None) -> StepMetadata:
        assert metadata is None, "these layers come first"
        return self._describe(batch, rows)

    def _describe(self, batch: Batch, rows: SequenceRows) -> StepMetadata:
        num_tokens, starts = batch.num_tokens, np.where(batch.has_failed, 0, batch.positions)
        lengths, num_evicted_tokens = starts + num_tokens, None
        if not self.needs_every_block:
            num_evicted_tokens = np.where(batch.has_failed, 0, self.num_evicted_blocks[batch.rows] * self._block_size)
            lengths -= num_evicted_tokens
        longest = int(lengths.max(initial=0))
        block_ids = self.block_ids[batch.rows, : -(-longest // self._block_size)]
        block_ids[batch.has_failed] = self.null_block
        num_prompt_tokens = rows.num_prompt_tokens[batch.rows]
        return build_step_metadata(
            num_tokens, starts, num_prompt_tokens, block_ids, self._block_size, num_evicted_tokens
        )

    def commit(self, step_rows: Sequence[int], rows: SequenceRows, sequences: Mapping[int, CachedSequence]) -> None:
        """Nothing: blocks become findable when they are full (`register`)."""

    def abort(self) -> None:
        """Nothing: a step has no blocks but those of its rows."""

    def check_integrity(self, sequences: Mapping[int, CachedSequence], rows: SequenceRows) -> None:
        ref_counts = [0] * self.pool.num_blocks
        for row, table in enumerate(self.block_ids):
            num_held = int(self.num_held_blocks[row])
            assert self.num_evicted_blocks[row] + num_held >= -(-rows.num_computed[row] // self._block_size)
            assert (table[num_held:] == self.null_block).all()
            assert row in sequences or num_held == self.num_evicted_blocks[row] == 0
            for block_id in table[:num_held].tolist():
                ref_counts[block_id] += 1
        self.pool.check_integrity(ref_counts)

    def _place(self, row: int, index: int) -> int:
        """The place in a row of block `index` of its sequence, behind the sinks; negative: the block is evicted."""
        return index - int(self.num_evicted_blocks[row])

    def _blocks(self, row: int, first: int, end: int | None) -> list[int]:
        """The blocks `first` to `end` of a row's sequence, as far as it has them; None: all from `first` on."""
        num_held = int(self.num_held_blocks[row])
        stop = num_held if end is None else min(num_held, self._place(row, end))
        return self.block_ids[row, max(0, self._place(row, first)) : max(0, stop)].tolist()

    def _shares(self, row: int, first: int, end: int | None) -> bool:
        return any(self.pool.ref_count(block_id) > 1 for block_id in self._blocks(row, first, end))

    def _unregister(self, row: int, first: int, end: int) -> None:
        for block_id in self._blocks(row, first, end):
            self.pool.unregister(block_id)

    def _evict(self, row: int, num_blocks: int) -> int:
        """Evicts so many blocks behind the sinks, if it is more than 0; returns how many became free."""
        if num_blocks <= 0:
            return 0
        blocks = self.block_ids[row, self._num_sink_blocks : self.num_held_blocks[row]]
        num_freed = self.pool.release(blocks[:num_blocks].tolist())
        blocks[:-num_blocks] = blocks[num_blocks:].copy()
        blocks[-num_blocks:] = self.null_block
        self.num_held_blocks[row] -= num_blocks
        self.num_evicted_blocks[row] += num_blocks
        return num_freed

    def _release(self, row: int, first: int) -> int:
        """Releases a row's blocks from place `first` on; returns how many became free."""
        blocks = self.block_ids[row, first : self.num_held_blocks[row]]
        num_freed = self.pool.release(blocks.tolist())
        blocks[:] = self.null_block
        self.num_held_blocks[row] = min(first, int(self.num_held_blocks[row]))
        return num_freed


class WindowGroup(BlockGroup):
    """The blocks of layers with a window beside layers without one.

    Nobody counts them: they are evicted as soon as steps are committed, and there are enough for all sequences of a
    dense worker (`SlidingWindow.pool_blocks`). Orphans give up theirs first; one that is claimed later begins anew.
    """

    name = "windows"

    def evict(self, rows: SequenceRows) -> None:
        """Evicts all blocks that no token after a row's committed ones reads, except one."""
        num_evicted = self.sliding_window.num_evicted_blocks_of(rows.num_committed)
        for row in np.flatnonzero(num_evicted > self.num_evicted_blocks).tolist():
            self._evict(row, int(num_evicted[row] - self.num_evicted_blocks[row]))

    def evict_before(self, row: int, position: int) -> int:
        """Nothing: they are evicted in every plan."""
        return 0

    def make_room(self, num_blocks: int, rows: SequenceRows, orphans: Iterable[int]) -> None:
        if num_blocks > self.pool.num_free_blocks:
            for row in orphans:
                self._evict(row, int(self.num_held_blocks[row]))
                if num_blocks <= self.pool.num_free_blocks:
                    return
        self.pool.check_room(num_blocks)

    def describe(self, batch: Batch, rows: SequenceRows, metadata: StepMetadata | None) -> StepMetadata:
        assert metadata is not None, "the layers without a window come first"
        return replace(metadata, windows=self._describe(batch, rows))
