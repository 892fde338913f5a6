"""`BlockTables`: the blocks and lengths of each sequence, as rows of numpy arrays. Part of the KV cache."""

from __future__ import annotations

import numpy as np

from services.attn_worker.cache.block_pool import BlockPool

NO_SEQUENCE = 0  # row for entries of unknown sequences: empty, all null blocks
_INITIAL_NUM_ROWS = 64


class BlockTables:
    """One row of numpy arrays per sequence. Rows are reused, and added when needed.

    The arrays are replaced when rows are added, so read them by name each time. An unused element of a table names the
    null block, whose index is the pool's number of blocks. A row from which blocks were dropped
    continues at their place with those behind them.
    """

    def __init__(self, pool: BlockPool, block_size: int, max_num_blocks: int) -> None:
        self._pool = pool
        self._block_size = block_size
        self._null_block = pool.num_blocks
        self._free_rows: list[int] = []
        self.block_ids = np.empty((0, max_num_blocks), np.int32)
        self._counts = np.zeros((6, 0), np.int64)
        self._add_rows(_INITIAL_NUM_ROWS)
        self._free_rows.remove(NO_SEQUENCE)

    def __len__(self) -> int:
        return len(self.block_ids)

    def take_row(self) -> int:
        """An empty row."""
        if not self._free_rows:
            self._add_rows(len(self))
        return self._free_rows.pop()

    def free_row(self, row: int) -> int:
        """Frees a row and its blocks; returns how many blocks became free."""
        num_freed = self.release_blocks(row, first=0)
        self._counts[:, row] = 0
        self._free_rows.append(row)
        return num_freed

    def add_blocks(self, row: int, num_blocks: int) -> None:
        """Adds blocks from the pool to the row. Raises CapacityError, and takes none, if there are too few."""
        first = self.num_held_blocks[row]
        self.block_ids[row, first : first + num_blocks] = self._pool.allocate(num_blocks)
        self.num_held_blocks[row] += num_blocks

    def share_blocks(self, row: int, other_row: int, num_blocks: int) -> None:
        """Adds the first blocks of another row to an empty row; both then share them, and lack the same ones."""
        self.block_ids[other_row, :num_blocks] = self.block_ids[row, :num_blocks]
        self.num_held_blocks[other_row] = num_blocks
        self.num_dropped_blocks[other_row] = self.num_dropped_blocks[row]
        for block_id in self.block_ids[row, :num_blocks].tolist():
            self._pool.pin(block_id)

    def drop_blocks(self, row: int, num_blocks: int, behind: int) -> int:
        """Releases the blocks behind the first `behind`, and counts them as dropped; returns how many became free."""
        blocks = self.block_ids[row, behind : self.num_held_blocks[row]]
        num_freed = self._pool.release(blocks[:num_blocks].tolist())
        blocks[:-num_blocks] = blocks[num_blocks:].copy()
        blocks[-num_blocks:] = self._null_block
        self.num_held_blocks[row] -= num_blocks
        self.num_dropped_blocks[row] += num_blocks
        return num_freed

    def release_blocks(self, row: int, first: int) -> int:
        """Releases a row's blocks from place `first` on; returns how many became free."""
        blocks = self.block_ids[row, first : self.num_held_blocks[row]]
        num_freed = self._pool.release(blocks.tolist())
        blocks[:] = self._null_block
        self.num_held_blocks[row] = min(first, int(self.num_held_blocks[row]))
        return num_freed

    def check_integrity(self, used_rows: set[int]) -> None:
        """Counts everything again; raises AssertionError on any disagreement."""
        rows = set(range(1, len(self)))
        assert sorted(rows - used_rows) == sorted(self._free_rows)
        ref_counts = [0] * self._pool.num_blocks
        for row, table in enumerate(self.block_ids):
            num_held = int(self.num_held_blocks[row])
            assert self.num_dropped_blocks[row] + num_held >= -(-self.num_computed[row] // self._block_size)
            assert (table[num_held:] == self._null_block).all()
            assert row in used_rows or num_held == 0
            for block_id in table[:num_held].tolist():
                ref_counts[block_id] += 1
        self._pool.check_integrity(ref_counts)

    def _add_rows(self, num_new: int) -> None:
        num_rows = len(self) + num_new
        self._free_rows.extend(reversed(range(num_rows - num_new, num_rows)))
        self.block_ids = np.pad(self.block_ids, ((0, num_new), (0, 0)), constant_values=self._null_block)
        self._counts = np.pad(self._counts, ((0, 0), (0, num_new)))
        # Views, int64 [num_rows]; num_computed is ahead of num_committed while a step runs.
        (
            self.num_prompt_tokens,
            self.num_computed,
            self.num_committed,
            self.num_dropped_blocks,
            self.num_held_blocks,
            self.num_hashed_blocks,
        ) = self._counts
