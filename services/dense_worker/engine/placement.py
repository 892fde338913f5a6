"""`Placement`: which of several attention workers' KV caches a sequence is opened in. Part of the scheduler."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from typing import NamedTuple

from services.dense_worker.engine.block_ledger import BlockLedger, DividedLedger
from services.dense_worker.engine.sequence import Sequence
from services.dense_worker.engine.session import Session


class Room(NamedTuple):
    """How many blocks a sequence may ever have."""

    num_blocks: int
    text: str  # the same for messages


class Placement:
    """Chooses for sequences that hold nothing and share nothing that they must stay with: the first. Engine thread."""

    def choose(self, sequence: Sequence, fitting: SequenceOf[int], session: Session) -> int:
        """One of `fitting`, the cache_ids that have room for the sequence now; there is at least one."""
        return fitting[0]

    def room_for(self, sequence: Sequence, ledgers: Mapping[int, BlockLedger], *, awaits: bool = False) -> Room:
        """The most blocks that these KV caches have for a sequence; with `awaits` those that are missing count, too."""
        num_blocks = max((each.num_blocks for each in ledgers.values()), default=0)
        which = "the largest cache" if len(ledgers) > 1 else "the cache"
        return Room(num_blocks, f"{which} has {num_blocks}")

    def divide(self, sequence: Sequence, num_blocks: int, session: Session) -> DividedLedger | None:
        """So many blocks of several KV caches, for a sequence that may need more than one has; None: too few are free.
        """
        return None

    def expect(self, num_blocks: int, until_s: float) -> None:
        """Some KV caches may be missing until then, on the monotonic clock; all together have so many blocks."""

    def expect_less(self, num_blocks: int) -> None:
        """A KV cache with so many blocks has left for good."""

    def note(self, sequence: Sequence) -> None:
        """A sequence will be opened in the cache that it names."""

    def forget(self, cache_id: int) -> None:
        """A KV cache is gone."""
