"""`SlidingWindow`: which blocks of the KV cache a sequence keeps. Both workers count with it, without torch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class SlidingWindow:
    """A sequence drops the blocks that no further token reads, except one, so that it can go back by a few tokens.

    It goes back when a step is lost, or when clients know fewer tokens than have been computed.
    """

    block_size: int  # tokens
    window: int | None = None  # a token reads this many keys at most, its own and those before it; None: all
    num_sink_tokens: int = 0  # all tokens read these first ones, too; their blocks are never dropped

    @property
    def num_sink_blocks(self) -> int:
        return -(-self.num_sink_tokens // self.block_size)

    def num_unread_blocks(self, position: int) -> int:
        """Number of blocks behind the sinks that neither the token at `position` reads nor any later one."""
        if self.window is None:
            return 0
        return max(0, max(0, position - self.window + 1) // self.block_size - self.num_sink_blocks)

    def num_evicted_blocks(self, position: int) -> int:
        """Number of blocks behind the sinks that a sequence has dropped when a step begins at `position`."""
        return max(0, self.num_unread_blocks(position) - 1)

    def num_evicted_blocks_of(self, positions: np.ndarray) -> np.ndarray:
        """`num_evicted_blocks` at each of these positions, without sinks; there is a window."""
        assert self.window is not None and not self.num_sink_tokens
        return (positions - self.window + 1) // self.block_size - 1

    def pool_blocks(self, max_num_seqs: int, max_num_step_tokens: int) -> int:
        """The most blocks that `max_num_seqs` sequences hold together if they drop blocks by their committed tokens.

        Each has the blocks from its window, and one before it, to its last committed token, and may have begun one
        more. At most three steps are not committed: one that has just ended, the next one, and the one that is planned.
        Two more may have left drafts behind, in as many rows as there are sequences.
        """
        assert self.window is not None and not self.num_sink_tokens
        num_own = -(-(self.window - 1) // self.block_size) + 3
        num_uncommitted = 3 * max_num_step_tokens + 2 * max_num_seqs
        return max_num_seqs * num_own - (-num_uncommitted // self.block_size)

    def max_blocks(self, num_step_tokens: int) -> int | None:
        """The most blocks that a sequence holds if no step computes more tokens of it; None: the window is no limit.

        A step takes its blocks before those of the step before it count as dropped. So the blocks reach from the window
        of the first token of one step to the last token of the next, with one block more, and those of the sinks.
        """
        if self.window is None:
            return None
        num_tokens = self.window - 1 + 2 * num_step_tokens
        return self.num_sink_blocks - (-(num_tokens - 1) // self.block_size) + 2
