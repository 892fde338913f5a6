"""`BlockCopier`: copies blocks between a device and rows of host memory, with checksums that the device computes.

On CUDA the copies run on a stream of their own, from and to pinned memory. On a CPU they happen at once.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import numpy as np
import torch

from services.attn_worker.cache.block_storage import BlockStorage

STAGING_BYTES = 32 * 2**20
_CPU_REST_FACTOR = 4.0
_NUM_STAGINGS = 2  # the host fills one while the device reads the other


@dataclass(frozen=True, slots=True)
class _Staging:
    """Room for the blocks of one copy, int64 [max_blocks, block_words]; on a CPU both are the same tensor."""

    on_host: torch.Tensor
    on_device: torch.Tensor
    is_free: torch.cuda.Event | None  # when the device has read what lies there; None on a CPU


class BlockCopier:
    """For one thread; `max_blocks` at a time."""

    def __init__(self, storage: BlockStorage, device: torch.device, staging_bytes: int = STAGING_BYTES) -> None:
        self.block_words = storage.block_words
        self.max_blocks = max(1, staging_bytes // (8 * self.block_words))
        # How much longer than a copy of blocks in use its thread should rest: on a CPU it takes time from the steps.
        self.rest_factor = _CPU_REST_FACTOR if device.type == "cpu" else 0.0
        self._storage = storage
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._stagings = itertools.cycle([self._make_staging() for _ in range(_NUM_STAGINGS)])
        self._weights = torch.from_numpy(_odd_weights(self.block_words)).to(device)

    @torch.inference_mode()
    def read(self, block_ids: Sequence[int]) -> tuple[torch.Tensor, list[int]]:
        """Copies blocks of the device to the host and waits for that.

        Returns int64 [num_blocks, block_words], which is valid until the next call, and the checksum of each.
        """
        staging, num_blocks = self._take_staging(), len(block_ids)
        with self._on_stream():
            words = staging.on_device[:num_blocks]
            self._storage.gather_blocks(self._to_device(block_ids), words)
            checksums = self.checksums(words)
            if staging.is_free is not None:
                staging.on_host[:num_blocks].copy_(words, non_blocking=True)
            return staging.on_host[:num_blocks], checksums.tolist()  # which waits for both copies

    @torch.inference_mode()
    def write(self, block_ids: Sequence[int], rows: Sequence[torch.Tensor]) -> torch.Tensor:
        """Copies rows of host memory, int64 [block_words] each, to blocks of the device. Waits only for the host.

        Returns the checksums of what has arrived, int64 [num_blocks] on the device.
        """
        staging, num_blocks = self._take_staging(), len(block_ids)
        for place, row in zip(staging.on_host[:num_blocks], rows, strict=True):
            copy_row(place, row)
        with self._on_stream():
            words = staging.on_device[:num_blocks]
            if staging.is_free is not None:
                words.copy_(staging.on_host[:num_blocks], non_blocking=True)
            checksums = self.checksums(words)
            self._storage.scatter_blocks(self._to_device(block_ids), words)
            if staging.is_free is not None:
                staging.is_free.record()
        return checksums

    @torch.inference_mode()
    def finish(self, checksums: Sequence[torch.Tensor]) -> list[int]:
        """Waits until all copies are done; returns the checksums of several calls of `write` together."""
        with self._on_stream():
            return torch.cat(list(checksums)).tolist()

    def wait_for(self, fence: torch.cuda.Event | None) -> None:
        """Later copies begin after what was launched before `fence`; None: that has ended."""
        if self._stream is not None and fence is not None:
            self._stream.wait_event(fence)

    def checksums(self, words: torch.Tensor) -> torch.Tensor:
        """A sum of 64-bit words, each times an odd number of its own, modulo 2^64: int64 [num_blocks].

        Any change of one word changes it, and so does nearly any change of several.
        """
        return (words * self._weights).sum(dim=1)

    def _take_staging(self) -> _Staging:
        staging = next(self._stagings)
        if staging.is_free is not None:
            staging.is_free.synchronize()
        return staging

    def _on_stream(self) -> AbstractContextManager[object]:
        return contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def _to_device(self, block_ids: Sequence[int]) -> torch.Tensor:
        return torch.tensor(block_ids, dtype=torch.int64, device=self._device)

    def _make_staging(self) -> _Staging:
        size = (self.max_blocks, self.block_words)
        if self._stream is None:
            words = torch.zeros(size, dtype=torch.int64)
            return _Staging(words, words, None)
        on_host = torch.zeros(size, dtype=torch.int64, pin_memory=True)
        on_device = torch.zeros(size, dtype=torch.int64, device=self._device)
        return _Staging(on_host, on_device, torch.cuda.Event(blocking=True))


def copy_row(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copies within host memory on this thread alone: threads of torch would poll for its next copy for a while."""
    np.copyto(target.numpy(), source.numpy())


def _odd_weights(count: int) -> np.ndarray:
    """Odd numbers without a pattern, int64 [count]: those of splitmix64 (Steele, Lea, Flood: OOPSLA 2014)."""
    with np.errstate(over="ignore"):
        mixed = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((mixed ^ (mixed >> np.uint64(31))) | np.uint64(1)).view(np.int64)
