"""`Retention`: which blocks of the KV cache a sequence keeps. Both workers count with it, without torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Retention:
    """A sequence drops the blocks that no further token reads, except one, so that it can go back by a few tokens.

    It goes back when a step is lost, or when clients know fewer tokens than have been computed.
    """

    block_size: int  # tokens
    window: int | None = None  # a token reads this many keys at most, its own and those before it; None: all

    def first_needed_block(self, position: int) -> int:
        """The first block that the token at `position` reads."""
        return 0 if self.window is None else max(0, position - self.window + 1) // self.block_size

    def num_dropped_blocks(self, position: int) -> int:
        """Number of leading blocks that a sequence has dropped when a step begins at `position`."""
        return max(0, self.first_needed_block(position) - 1)

    def max_blocks(self, num_step_tokens: int) -> int | None:
        """The most blocks that a sequence holds if no step computes more tokens of it; None: the window is no limit.

        A step takes its blocks before those of the step before it count as dropped. So the blocks reach from the window
        of the first token of one step to the last token of the next, with one block more.
        """
        if self.window is None:
            return None
        num_tokens = self.window - 1 + 2 * num_step_tokens
        return -(-(num_tokens - 1) // self.block_size) + 2
