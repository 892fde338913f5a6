"""The single copy per step from host to device: int32 arrays, packed in pinned memory.

Used by the CUDA attention backends on their engine thread.
"""

from __future__ import annotations

import math

import numpy as np
import torch

_ALIGNMENT = 32  # int32 elements; kernels are compiled for pointers that are multiples of 16 bytes
_NUM_STAGING_BUFFERS = 3  # steps whose copies may be pending
_MAX_NUM_ARRAYS = 32  # in one step


class StepUpload:
    """Call `begin`, then `reserve` and fill arrays, then `send`. Addresses depend only on the reserved shapes."""

    def __init__(self, num_entries: int, device: torch.device) -> None:
        """Makes room for `num_entries` int32 elements in up to 32 arrays. Raises RuntimeError if memory is short."""
        size = num_entries + _ALIGNMENT * _MAX_NUM_ARRAYS
        is_cuda = device.type == "cuda"
        self._device_buffer = torch.zeros(size, dtype=torch.int32, device=device)
        self._staging = [
            torch.zeros(size, dtype=torch.int32, pin_memory=is_cuda) for _ in range(_NUM_STAGING_BUFFERS)
        ]
        self._arrays = [buffer.numpy() for buffer in self._staging]
        self._copied = [torch.cuda.Event() for _ in self._staging] if is_cuda else []
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
        assert end <= len(self._device_buffer), "the step's arrays are larger than the buffer"
        self._length = -(-end // _ALIGNMENT) * _ALIGNMENT
        return self._arrays[self._index][start:end].reshape(shape), self._device_buffer[start:end].view(shape)

    def send(self) -> None:
        """Enqueues the copy on the current stream."""
        staging = self._staging[self._index]
        self._device_buffer[: self._length].copy_(staging[: self._length], non_blocking=True)
        if self._copied:
            self._copied[self._index].record()
