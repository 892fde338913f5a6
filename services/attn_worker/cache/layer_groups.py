"""`LayerGroups`: the blocks of all sequences in one or two groups of layers. Part of the KV cache.

The first group decides what a sequence may hold: the scheduler counts its blocks. If some layers have a window and the
others have none, those with a window are a second group, whose blocks are dropped when no token reads them any more.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from services.attn_worker.cache.block_tables import BlockTables
from services.attn_worker.cache.sequence_rows import SequenceRows
from services.attn_worker.cache.window_group import WindowGroup
from services.attn_worker.runner.step_metadata import StepMetadata, build_step_metadata
from services.common.kv_cache.retention import Retention


class LayerGroups:
    """A table for each group, and the rows that they share."""

    def __init__(
        self, num_blocks: int, retention: Retention, window_group: WindowGroup | None, max_num_blocks: int
    ) -> None:
        """`retention` is that of the first group; `max_num_blocks`: of one sequence."""
        self._block_size = retention.block_size
        self.main = BlockTables(num_blocks, retention, max_num_blocks)
        self.windows: BlockTables | None = None
        self.tables: tuple[BlockTables, ...] = (self.main,)
        if window_group is not None:
            of_windows = Retention(self._block_size, window_group.window)
            self.windows = BlockTables(window_group.num_blocks, of_windows, max_num_blocks)
            self.tables = (self.main, self.windows)
        self.rows = SequenceRows(self.tables)

    def can_return(self, row: int, position: int) -> bool:
        """Whether a row has all blocks that the token at `position` reads."""
        return all(tables.can_return(row, position) for tables in self.tables)

    def num_dropped_tokens(self, row: int) -> int:
        """Tokens that a row lacks in some group."""
        return max(int(tables.num_dropped_blocks[row]) for tables in self.tables) * self._block_size

    def shares_blocks(self, row: int, first: int, end: int | None = None) -> bool:
        """Whether other rows have any of the blocks `first` to `end` of a row's sequence; None: all from `first` on."""
        return any(tables.shares_blocks(row, first, end) for tables in self.tables)

    def unregister_blocks(self, row: int, first: int, end: int) -> None:
        """Forgets the hashes of the blocks `first` to `end` of a row's sequence."""
        for tables in self.tables:
            tables.unregister_blocks(row, first, end)

    def drop_behind_windows(self) -> None:
        """Drops the blocks of the second group that no token after a row's committed ones reads, except one."""
        if self.windows is None:
            return
        num_dropped = self.windows.retention.num_dropped_blocks_of(self.rows.num_committed)
        for row in np.flatnonzero(num_dropped > self.windows.num_dropped_blocks).tolist():
            self.windows.drop_blocks(row, int(num_dropped[row]))

    def drop_windows(self, rows: Iterable[int], num_blocks: int) -> None:
        """Drops all blocks that `rows` have in the second group, one row after the other, until `num_blocks` are free.
        """
        windows = self.windows
        if windows is None or num_blocks <= windows.pool.num_free_blocks:
            return
        for row in rows:
            windows.drop_blocks(row, int(windows.num_dropped_blocks[row] + windows.num_held_blocks[row]))
            if num_blocks <= windows.pool.num_free_blocks:
                return

    def share_blocks(self, row: int, other_row: int, num_blocks: int) -> None:
        """Shares the first blocks of a row's sequence with an empty row, which then lacks the same dropped ones."""
        for tables in self.tables:
            tables.share_blocks(row, other_row, num_blocks)

    def last_blocks(self, row: int, other_row: int, index: int) -> list[tuple[int, int]]:
        """The block `index` of the sequences of both rows, in each group."""
        return [tables.last_blocks(row, other_row, index) for tables in self.tables]

    def missing_blocks(self, rows: np.ndarray, lengths: np.ndarray) -> Iterator[tuple[int, list[int]]]:
        """The indexes of `rows` that lack blocks for as many tokens, with the number of blocks in each group."""
        num_missing = [tables.num_missing_blocks(rows, lengths) for tables in self.tables]
        is_short = num_missing[0] > 0
        for each in num_missing[1:]:
            is_short |= each > 0
        for index in np.flatnonzero(is_short).tolist():
            yield index, [max(0, int(each[index])) for each in num_missing]

    def add_blocks(self, row: int, num_blocks: Sequence[int]) -> None:
        """Adds blocks of each group to a row. Raises CapacityError, and takes none, if one of them has too few."""
        if self.windows is None:
            self.main.add_blocks(row, num_blocks[0])
            return
        self.windows.pool.check_room(num_blocks[1])
        self.main.add_blocks(row, num_blocks[0])
        self.windows.add_blocks(row, num_blocks[1])

    def release_blocks(self, row: int, first: int) -> int:
        """Releases the blocks of a row's sequence from `first` on; returns how many of the first group became free."""
        num_freed, *_ = [tables.release_blocks(row, tables.place(row, first)) for tables in self.tables]
        return num_freed

    def metadata(self, rows: np.ndarray, num_tokens: np.ndarray, has_failed: np.ndarray) -> StepMetadata:
        """The metadata of a step. Lengths already include it; failed sequences use only the null block."""
        starts = np.where(has_failed, 0, self.rows.num_computed[rows] - num_tokens)
        num_prompt_tokens = self.rows.num_prompt_tokens[rows]
        metadata: StepMetadata | None = None
        for tables in reversed(self.tables):  # the first group's has that of the other one
            lengths, num_dropped = starts + num_tokens, None
            if tables.retention.window is not None:
                num_dropped = np.where(has_failed, 0, tables.num_dropped_blocks[rows] * self._block_size)
                lengths -= num_dropped
            longest = int(lengths.max(initial=0))
            block_ids = tables.block_ids[rows, : -(-longest // self._block_size)]
            block_ids[has_failed] = tables.null_block
            metadata = build_step_metadata(
                num_tokens, starts, num_prompt_tokens, block_ids, self._block_size, num_dropped, metadata
            )
        assert metadata is not None, "there is at least one group"
        return metadata
