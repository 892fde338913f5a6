"""`BlockCopier`: copies blocks between a device and rows of host memory, with checksums that the device computes.

A row, int64 [block_words], holds one block of all layers, as `BlockStorage.gather_blocks` writes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from services.attn_worker.cache.block_storage import BlockStorage

STAGING_BYTES = 32 * 2**20
_MAX_READ_ON_CPU = 32  # blocks; between two such copies the thread may rest, so that steps have the processor


class BlockCopier(Protocol):
    """For one thread; `max_blocks` at a time. Rows are named by their index in the memory given at the beginning."""

    max_blocks: int
    max_read: int  # how many blocks `read` should copy at a time
    rest_factor: float  # how much longer than a copy of blocks in use its thread should rest

    def load_kernels(self) -> None:
        """Makes ready for the first copy."""

    def pin_ahead(self) -> bool:
        """Makes a part of the rows ready for copies, in a few milliseconds; False: there is none left."""

    def read(self, block_ids: Sequence[int], rows: Sequence[int]) -> list[int]:
        """Copies blocks of the device to rows and waits for that. Returns the checksum of each."""

    def write(self, block_ids: Sequence[int], rows: Sequence[int]) -> torch.Tensor:
        """Copies rows to different blocks of the device; the rows must not change before `finish`.

        Returns the checksums of what has arrived, int64 [num_blocks] on the device.
        """

    def finish(self, checksums: Sequence[torch.Tensor]) -> list[int]:
        """Waits until all copies are done; returns the checksums of several calls of `write` together."""

    def wait_for(self, fence: torch.cuda.Event | None) -> None:
        """Later copies begin after what was launched before `fence`; None: that has ended."""

    def close(self) -> None:
        """Gives the rows up. Nothing may be called afterwards."""


class CpuBlockCopier:
    """A `BlockCopier` for blocks in host memory, where copies happen at once and take time from the steps."""

    rest_factor = 4.0

    def __init__(self, storage: BlockStorage, rows: torch.Tensor, staging_bytes: int = STAGING_BYTES) -> None:
        """rows: int64 [num_rows, block_words], in host memory."""
        self.max_blocks = max_blocks(storage, staging_bytes)
        self.max_read = min(_MAX_READ_ON_CPU, self.max_blocks)
        self._storage = storage
        self._rows = rows
        self._words = torch.zeros(self.max_blocks, storage.block_words, dtype=torch.int64)
        self._weights = checksum_weights(storage.block_words)

    def load_kernels(self) -> None:
        pass

    def pin_ahead(self) -> bool:
        return False

    @torch.inference_mode()
    def read(self, block_ids: Sequence[int], rows: Sequence[int]) -> list[int]:
        words = self._words[: len(block_ids)]
        self._storage.gather_blocks(torch.tensor(block_ids, dtype=torch.int64), words)
        for row, content in zip(rows, words, strict=True):
            copy_row(self._rows[row], content)
        return checksums(words, self._weights).tolist()

    @torch.inference_mode()
    def write(self, block_ids: Sequence[int], rows: Sequence[int]) -> torch.Tensor:
        words = self._words[: len(block_ids)]
        for place, row in zip(words, rows, strict=True):
            copy_row(place, self._rows[row])
        self._storage.scatter_blocks(torch.tensor(block_ids, dtype=torch.int64), words)
        return checksums(words, self._weights)

    def finish(self, checksums: Sequence[torch.Tensor]) -> list[int]:
        return torch.cat(list(checksums)).tolist()

    def wait_for(self, fence: torch.cuda.Event | None) -> None:
        assert fence is None, "a CPU records no events"

    def close(self) -> None:
        del self._rows


def max_blocks(storage: BlockStorage, staging_bytes: int) -> int:
    """How many blocks may be copied at a time."""
    return max(1, staging_bytes // (8 * storage.block_words))


def copy_row(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copies within host memory on this thread alone: threads of torch would poll for its next copy for a while."""
    np.copyto(target.numpy(), source.numpy())


def checksums(words: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """A sum of 64-bit words, each times an odd number of its own, modulo 2^64: int64 [num_blocks].

    words: int64 [num_blocks, block_words]; weights: those of `checksum_weights`, on the same device. Any change of one
    word changes it, and so does nearly any change of several.
    """
    return (words * weights).sum(dim=1)


def checksum_weights(count: int) -> torch.Tensor:
    """Odd numbers without a pattern, int64 [count]: those of splitmix64 (Steele, Lea, Flood: OOPSLA 2014)."""
    with np.errstate(over="ignore"):
        mixed = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return torch.from_numpy(((mixed ^ (mixed >> np.uint64(31))) | np.uint64(1)).view(np.int64))
