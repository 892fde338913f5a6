"""`DraftBlocks`: which blocks of a cache for drafts hold the tokens of which sequence. No torch."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Hashable, Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

BLOCK_SIZE = 64  # tokens
SPARE_BLOCK = 0  # of no sequence: rows of padding write there
PADDED_TOKENS = 2**14  # most tokens that attention reads at once, padded, unless a single sequence has more
MAX_LATE_TOKENS = 16  # known tokens of a sequence that are computed together with those of a step

Key = TypeVar("Key", bound=Hashable)


@dataclass(slots=True, eq=False)
class CachedTokens:
    """What the cache holds of one sequence."""

    blocks: list[int] = field(default_factory=list)
    num_tokens: int = 0  # from `start` on, whose keys and values are there for certain
    start: int = 0  # position of the first token in the blocks


class DraftBlocks(Generic[Key]):
    """Each sequence has all the blocks that it needs, or none. Who has not used its blocks for longest loses them."""

    def __init__(self, num_blocks: int) -> None:
        """num_blocks: all, the spare one included"""
        self._free = [block for block in range(num_blocks) if block != SPARE_BLOCK]
        self._cached: OrderedDict[Key, CachedTokens] = OrderedDict()

    @property
    def num_free(self) -> int:
        return len(self._free)

    def find(self, key: Key) -> CachedTokens | None:
        """What the cache holds of a sequence; None: nothing."""
        return self._cached.get(key)

    def reserve(self, key: Key, num_tokens: int, others: Collection[Key]) -> CachedTokens | None:
        """Blocks for so many tokens of a sequence; takes them from sequences that are not among `others`.

        None: there are too few. Then the sequence loses those that it has.
        """
        cached = self._cached.pop(key, None) or CachedTokens()
        self._cached[key] = cached
        num_missing = -(-num_tokens // BLOCK_SIZE) - len(cached.blocks)
        while len(self._free) < num_missing:
            victim = next((each for each in self._cached if each != key and each not in others), None)
            if victim is None:
                self.forget(key)
                return None
            self.forget(victim)
        cached.blocks += [self._free.pop() for _ in range(num_missing)]
        return cached

    def forget(self, key: Key) -> None:
        """Frees the blocks of a sequence, if it has any."""
        if (cached := self._cached.pop(key, None)) is not None:
            self._free += cached.blocks

    def forget_all(self) -> None:
        """Frees all blocks."""
        for key in list(self._cached):
            self.forget(key)


def block_buckets(max_len: int) -> list[int]:
    """The numbers of blocks that graphs are captured for: powers of two, up to a sequence of so many tokens."""
    buckets = [1]
    while buckets[-1] * BLOCK_SIZE < max_len:
        buckets.append(2 * buckets[-1])
    return buckets


class HasBlocks(Protocol):
    """A sequence with what the cache holds of it."""

    cached: CachedTokens


Held = TypeVar("Held", bound=HasBlocks)


def padded_groups(sequences: SequenceOf[Held]) -> Iterator[list[Held]]:
    """Parts that attention can pad to their longest sequence. sequences: at least one, sorted by their blocks."""
    group: list[Held] = []
    for each in sequences:
        if group and (len(group) + 1) * len(each.cached.blocks) * BLOCK_SIZE > PADDED_TOKENS:
            yield group
            group = []
        group.append(each)
    yield group
