"""`BlockTables`: the blocks of each sequence in one group of layers, as rows of numpy arrays. Part of the KV cache."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from services.attn_worker.cache.block_pool import BlockPool
from services.common.kv_cache.retention import Retention


class BlockTables:
    """A pool of blocks, and a row of arrays for each row of `SequenceRows`, which adds rows when needed.

    The arrays are replaced when rows are added, so read them by name each time. An unused element of a table names the
    null block, whose index is the pool's number of blocks. A row from which blocks were dropped continues at their
    place with those behind them. `retention` says which blocks these are.
    """

    def __init__(self, num_blocks: int, retention: Retention, max_num_blocks: int) -> None:
        """`max_num_blocks`: of one sequence."""
        self.pool = BlockPool(num_blocks)
        self.retention = retention
        self.null_block = num_blocks
        self._num_sink_blocks = retention.num_sink_blocks
        self.block_ids = np.empty((0, max_num_blocks), np.int32)
        self.num_held_blocks = np.zeros(0, np.int64)
        self.num_dropped_blocks = np.zeros(0, np.int64)

    def add_rows(self, num_new: int) -> None:
        """Adds empty rows."""
        self.block_ids = np.pad(self.block_ids, ((0, num_new), (0, 0)), constant_values=self.null_block)
        self.num_held_blocks = np.pad(self.num_held_blocks, (0, num_new))
        self.num_dropped_blocks = np.pad(self.num_dropped_blocks, (0, num_new))

    def free_row(self, row: int) -> int:
        """Empties a row; returns how many blocks became free."""
        num_freed = self.release_blocks(row, first=0)
        self.num_dropped_blocks[row] = 0
        return num_freed

    def place(self, row: int, index: int) -> int:
        """The place in a row of block `index` of its sequence, behind the sinks; negative: the block is dropped."""
        return index - int(self.num_dropped_blocks[row])

    def can_return(self, row: int, position: int) -> bool:
        """Whether the row has all blocks that the token at `position` reads."""
        return bool(self.num_dropped_blocks[row] <= self.retention.num_unread_blocks(position))

    def num_missing_blocks(self, rows: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """Number of blocks that each of `rows` lacks for as many tokens; not above 0: none."""
        num_missing = -(-lengths // self.retention.block_size) - self.num_held_blocks[rows]
        return num_missing if self.retention.window is None else num_missing - self.num_dropped_blocks[rows]

    def add_blocks(self, row: int, num_blocks: int) -> None:
        """Adds blocks from the pool to the row. Raises CapacityError, and takes none, if there are too few."""
        first = self.num_held_blocks[row]
        self.block_ids[row, first : first + num_blocks] = self.pool.allocate(num_blocks)
        self.num_held_blocks[row] += num_blocks

    def share_blocks(self, row: int, other_row: int, num_blocks: int) -> None:
        """Shares the first blocks of a row's sequence with an empty row, which then lacks the same dropped ones."""
        num_shared = self.place(row, num_blocks)
        self.block_ids[other_row, :num_shared] = self.block_ids[row, :num_shared]
        self.num_held_blocks[other_row] = num_shared
        self.num_dropped_blocks[other_row] = self.num_dropped_blocks[row]
        for block_id in self.block_ids[row, :num_shared].tolist():
            self.pool.pin(block_id)

    def last_blocks(self, row: int, other_row: int, index: int) -> tuple[int, int]:
        """The block `index` of the sequences of both rows, which lack the same ones."""
        place = self.place(row, index)
        return int(self.block_ids[row, place]), int(self.block_ids[other_row, place])

    def shares_blocks(self, row: int, first: int, end: int | None = None) -> bool:
        """Whether other rows have any of the blocks `first` to `end` of a row's sequence, as far as it has them.

        None: all from `first` on.
        """
        return any(self.pool.ref_count(block_id) > 1 for block_id in self._blocks(row, first, end))

    def register_blocks(self, row: int, digests: Sequence[bytes], first: int) -> None:
        """Makes the blocks from `first` on findable under the digests of a row's sequence, as far as it has them."""
        num_sinks, num_dropped = self._num_sink_blocks, int(self.num_dropped_blocks[row])
        for index in range(first, len(digests)):
            if index < num_sinks:
                self.pool.register_hash(int(self.block_ids[row, index]), digests[index])
            elif index >= num_sinks + num_dropped:
                self.pool.register_hash(int(self.block_ids[row, index - num_dropped]), digests[index])

    def unregister_blocks(self, row: int, first: int, end: int) -> None:
        """Forgets the hashes of the blocks `first` to `end` of a row's sequence, as far as it has them."""
        for block_id in self._blocks(row, first, end):
            self.pool.unregister(block_id)

    def drop_blocks(self, row: int, num_dropped: int) -> int:
        """Drops blocks behind the sinks until there are `num_dropped`; returns how many became free."""
        num_more = num_dropped - int(self.num_dropped_blocks[row])
        if num_more <= 0:
            return 0
        blocks = self.block_ids[row, self._num_sink_blocks : self.num_held_blocks[row]]
        num_freed = self.pool.release(blocks[:num_more].tolist())
        blocks[:-num_more] = blocks[num_more:].copy()
        blocks[-num_more:] = self.null_block
        self.num_held_blocks[row] -= num_more
        self.num_dropped_blocks[row] += num_more
        return num_freed

    def release_blocks(self, row: int, first: int) -> int:
        """Releases a row's blocks from place `first` on; returns how many became free."""
        blocks = self.block_ids[row, first : self.num_held_blocks[row]]
        num_freed = self.pool.release(blocks.tolist())
        blocks[:] = self.null_block
        self.num_held_blocks[row] = min(first, int(self.num_held_blocks[row]))
        return num_freed

    def _blocks(self, row: int, first: int, end: int | None) -> list[int]:
        num_held = int(self.num_held_blocks[row])
        stop = num_held if end is None else min(num_held, self.place(row, end))
        return self.block_ids[row, max(0, self.place(row, first)) : max(0, stop)].tolist()

    def check_integrity(self, used_rows: set[int], num_computed: np.ndarray) -> None:
        """Counts everything again; raises AssertionError on any disagreement."""
        ref_counts = [0] * self.pool.num_blocks
        for row, table in enumerate(self.block_ids):
            num_held = int(self.num_held_blocks[row])
            assert self.num_dropped_blocks[row] + num_held >= -(-num_computed[row] // self.retention.block_size)
            assert (table[num_held:] == self.null_block).all()
            assert row in used_rows or num_held == self.num_dropped_blocks[row] == 0
            for block_id in table[:num_held].tolist():
                ref_counts[block_id] += 1
        self.pool.check_integrity(ref_counts)
