"""The single copy per step from host to device: int32 arrays, packed in pinned memory.

Used by the CUDA attention backends on their engine thread.
"""

from __future__ import annotations

import math
from typing import TypeVar

import numpy as np
import torch

K, V = TypeVar("K"), TypeVar("V")

_ALIGNMENT = 32  # int32 elements; kernels are compiled for pointers that are multiples of 16 bytes
_NUM_STAGING_BUFFERS = 3  # steps whose copies may be pending
_MAX_NUM_ARRAYS = 32  # in one step
_MAX_NUM_VIEWS = 4096  # that are kept of each kind: to make one takes longer than to find it


class StepUpload:
    """Call `begin`, then `reserve` and fill arrays, then `send`. Addresses depend only on the reserved shapes."""

    def __init__(self, num_entries: int, device: torch.device) -> None:
        """Makes room for `num_entries` int32 elements in up to 32 arrays. Raises RuntimeError if memory is short."""
        size = num_entries + _ALIGNMENT * _MAX_NUM_ARRAYS
        self._size = size
        is_cuda = device.type == "cuda"
        self._device_buffer = torch.zeros(size, dtype=torch.int32, device=device)
        self._staging = [
            torch.zeros(size, dtype=torch.int32, pin_memory=is_cuda) for _ in range(_NUM_STAGING_BUFFERS)
        ]
        self._arrays = [buffer.numpy() for buffer in self._staging]
        self._copied = [torch.cuda.Event() for _ in self._staging] if is_cuda else []
        self._views: dict[tuple[int, tuple[int, ...]], torch.Tensor] = {}  # by the start and the shape of an array
        self._copies: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}  # by staging buffer and length
        self._index = 0
        self._length = 0

    def begin(self) -> None:
        """Starts the arrays of a step. Waits if the copy of three steps ago is not done."""
        self._index = (self._index + 1) % len(self._staging)
        self._length = 0
        if self._copied:
            self._copied[self._index].synchronize()

    def reserve(self, shape: tuple[int, ...]) -> tuple[np.ndarray, torch.Tensor]:
        """An array to fill before `send`, and the device tensor that holds its values after `send`, until the next."""
        start, num_entries = self._length, math.prod(shape)
        end = start + num_entries
        assert end <= self._size, "the step's arrays are larger than the buffer"
        self._length = -(-end // _ALIGNMENT) * _ALIGNMENT
        on_device = self._views.get((start, shape))
        if on_device is None:
            on_device = _kept(self._views, (start, shape), self._device_buffer[start:end].view(shape))
        return self._arrays[self._index][start:end].reshape(shape), on_device

    def send(self) -> None:
        """Enqueues the copy on the current stream."""
        index, length = key = self._index, self._length
        if key not in self._copies:
            _kept(self._copies, key, (self._device_buffer[:length], self._staging[index][:length]))
        on_device, staging = self._copies[key]
        on_device.copy_(staging, non_blocking=True)
        if self._copied:
            self._copied[self._index].record()


def _kept(kept: dict[K, V], key: K, value: V) -> V:
    """The value, which is kept by the key; all others are forgotten if they are too many."""
    if len(kept) >= _MAX_NUM_VIEWS:
        kept.clear()
    kept[key] = value
    return value
