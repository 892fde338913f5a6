"""`Tier`: what the KV cache knows of a place below it, where blocks of the first group have copies."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

MissingBlock = tuple[bytes, int]  # the digest of what a block shall hold, and the block


@dataclass(slots=True)
class TierCounts:
    """Counts of a tier; the totals since its start."""

    num_bytes: int = 0
    num_slots: int = 0
    num_used_slots: int = 0
    num_written_blocks: int = 0
    num_read_blocks: int = 0
    num_skipped_blocks: int = 0  # not written: too many waited, or they were evicted while they did
    num_corrupt_blocks: int = 0  # whose checksum was wrong


class BlockSupplier(Protocol):
    """Where blocks can be loaded from. Called by the engine thread; nothing here waits for a copy."""

    def has(self, digest: bytes) -> bool:
        """Whether a block is there. It may have gone when `load` looks for it."""

    def load(
        self, blocks: Sequence[MissingBlock], fence: torch.cuda.Event | None, on_loaded: Callable[[int], None]
    ) -> None:
        """Copies blocks to the device, where nobody else uses them, after what was launched before `fence`.

        Another thread calls `on_loaded` with the number of first ones that are there then: all, or those before one
        that was evicted, or was corrupt. The tier has forgotten that one.
        """


class Tier(BlockSupplier, Protocol):
    """Blocks by the digests of the prefix cache."""

    counts: TierCounts  # may be read from any thread

    @property
    def generation(self) -> int:
        """The highest generation of prefixes that has been kept, also by an earlier process; 0: none."""

    def keep_generation(self, generation: int) -> None:
        """Keeps a higher one, as long as the blocks. Called before blocks of this generation are offered."""

    def offer(self, digests: Iterable[bytes], *, is_urgent: bool = False) -> None:
        """These blocks are findable on the device: copies of them may be made from now on.

        `is_urgent`: before all others, as the blocks will be used for something else in the next steps.
        """

    def cancel_loads(self) -> None:
        """When it returns, no load writes to a block any more. Some may have been reported, the others never are.

        Waits for the copy under way. Raises DeviceError if that takes too long.
        """

    def close(self, timeout_s: float) -> None:
        """Ends; what has been offered is written before, as far as it takes at most `timeout_s` seconds."""


class NoTier:
    """A `Tier` that has nothing."""

    generation = 0

    def __init__(self) -> None:
        self.counts = TierCounts()

    def keep_generation(self, generation: int) -> None:
        """There are no blocks that could outlive the worker."""

    def has(self, digest: bytes) -> bool:
        return False

    def offer(self, digests: Iterable[bytes], *, is_urgent: bool = False) -> None:
        """Nothing is kept."""

    def load(
        self, blocks: Sequence[MissingBlock], fence: torch.cuda.Event | None, on_loaded: Callable[[int], None]
    ) -> None:
        raise AssertionError("it has no block")

    def cancel_loads(self) -> None:
        """There are none."""

    def close(self, timeout_s: float) -> None:
        """Nothing is open."""
