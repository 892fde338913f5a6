"""`BlockLedger`: counts how many KV cache blocks the scheduler may still promise.

The attention worker owns the blocks; the scheduler only counts them. All changes are deltas that commute with messages
still being sent, so the count here is never above the true one:

    opening     reserves blocks first; the answer says how many blocks really left the free pool
    plan        allocates from a sequence's reservation or from available blocks; both sides compute the same number
    closing     returns blocks only when the attention worker's answer says that they are free
    dropping    (blocks that a sequence's window has left behind) likewise, because others may still hold them
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from services.common.kv_cache.sliding_window import SlidingWindow
from services.step import NewSequence


@dataclass(slots=True)
class SequenceCounts:
    """Tokens and blocks; those of a sequence with a row of `DecodeRows` are there instead."""

    num_computed_tokens: int = 0
    num_pending_tokens: int = 0
    num_blocks: int = 0  # blocks that it holds after all published plans have run
    num_reserved_blocks: int = 0  # blocks promised to it but not allocated yet
    slot: ClassVar[None] = None  # it has no row of `DecodeRows`


class BlockLedger:
    """The counts of one attachment. Available blocks = free − reserved, never negative."""

    def __init__(self, sliding_window: SlidingWindow, num_blocks: int, num_free_blocks: int) -> None:
        self.sliding_window = sliding_window
        self.block_size = sliding_window.block_size
        self.num_blocks = num_blocks
        self.num_free_blocks = num_free_blocks
        self.num_reserved_blocks = 0

    @property
    def num_available_blocks(self) -> int:
        return self.num_free_blocks - self.num_reserved_blocks

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def most_blocks(self, num_tokens: int, num_step_tokens: int) -> int:
        """The most blocks that a sequence holds at a time until it has `num_tokens` tokens.

        No step computes more than `num_step_tokens` of them.
        """
        limit = self.sliding_window.max_blocks(num_step_tokens)
        num_blocks = self.blocks_for(num_tokens)
        return num_blocks if limit is None else min(num_blocks, limit)

    def reserve(self, num_blocks: int) -> None:
        """Promises free blocks, at most `num_available_blocks`."""
        assert num_blocks <= self.num_available_blocks, (num_blocks, self.num_available_blocks)
        self.num_reserved_blocks += num_blocks

    def unreserve(self, num_blocks: int) -> None:
        """Withdraws a promise."""
        assert num_blocks <= self.num_reserved_blocks, (num_blocks, self.num_reserved_blocks)
        self.num_reserved_blocks -= num_blocks

    def take(self, num_blocks: int) -> None:
        """Removes blocks from the free pool."""
        assert num_blocks <= self.num_free_blocks, (num_blocks, self.num_free_blocks)
        self.num_free_blocks -= num_blocks

    def take_for(self, counts: SequenceCounts, num_blocks: int) -> bool:
        """Takes blocks for a sequence, those first that are reserved for it. False: there are too few, it took none."""
        num_reserved = min(num_blocks, counts.num_reserved_blocks)
        if num_blocks - num_reserved > self.num_available_blocks:
            return False
        self.unreserve(num_reserved)
        self.take(num_blocks)
        counts.num_reserved_blocks -= num_reserved
        return True

    def give_back(self, num_blocks: int) -> None:
        """Adds blocks to the free pool that the attention worker reports as free."""
        self.num_free_blocks += num_blocks
        assert self.num_free_blocks <= self.num_blocks, (self.num_free_blocks, self.num_blocks)


class DividedLedger(BlockLedger):
    """The blocks of one sequence in several KV caches: they are reserved, taken and given up all at once.

    The first cache has the first tokens, and so on. Blocks come back one cache at a time, as answers say.
    """

    def __init__(self, shares: Mapping[int, tuple[BlockLedger, int]]) -> None:
        """`shares`: by cache_id, its ledger and how many of its blocks the sequence gets."""
        first, _ = next(iter(shares.values()))
        num_blocks = sum(share for _, share in shares.values())
        super().__init__(first.sliding_window, num_blocks, num_blocks)
        self._shares = shares

    @property
    def cache_ids(self) -> Collection[int]:
        return self._shares.keys()

    def num_blocks_in(self, cache_id: int) -> int:
        """Blocks of one of these KV caches."""
        return self._shares[cache_id][1]

    def reserve(self, num_blocks: int) -> None:
        super().reserve(num_blocks)
        for ledger, share in self._all_or_none(num_blocks):
            ledger.reserve(share)

    def unreserve(self, num_blocks: int) -> None:
        super().unreserve(num_blocks)
        for ledger, share in self._all_or_none(num_blocks):
            ledger.unreserve(share)

    def take(self, num_blocks: int) -> None:
        super().take(num_blocks)
        for ledger, share in self._all_or_none(num_blocks):
            ledger.take(share)

    def take_without(self, cache_id: int) -> None:
        """Removes what a sequence has, or is getting, in the KV caches that are left without this one."""
        for key, (ledger, share) in self._shares.items():
            if key != cache_id:
                ledger.take(share)

    def split(self, new: NewSequence) -> list[NewSequence]:
        """What each KV cache must know of the sequence: which tokens it has."""
        parts, first = [], 0
        for cache_id, (_, share) in self._shares.items():
            end = first + share * self.block_size
            parts.append(replace(new, token_ids=(), cache_id=cache_id, part=range(first, end)))
            first = end
        return parts

    def _all_or_none(self, num_blocks: int) -> Collection[tuple[BlockLedger, int]]:
        assert num_blocks in (0, self.num_blocks), (num_blocks, self.num_blocks)
        return self._shares.values() if num_blocks else ()
