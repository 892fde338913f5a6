"""How a step gets to the device what the host knows, without a wait: `upload` copies an array, and kernels can read
the host's memory, of which `HostStages` has pieces.
"""

from __future__ import annotations

import numpy as np
import torch

_NUM_STAGES = 3  # one is being filled, and kernels of up to two steps that have been launched may still read the others


def upload(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """Enqueues a copy of the array to `device`. The caller may reuse the array's memory at once."""
    source = torch.from_numpy(array)
    if device.type != "cuda":
        return source.to(device)
    # A copy from pageable memory would first wait for the stream. torch keeps the pinned memory until the copy
    # is done.
    return source.pin_memory().to(device, non_blocking=True)


class HostStages:
    """Pieces of pinned memory that are used in turn. For one thread, and kernels of its current stream.

    A copy to the device would keep the kernel behind it waiting: from the kernel before to the copy, and from the copy
    to the kernel behind it, the device takes some 10 µs each.
    """

    def __init__(self) -> None:
        self._memory = [torch.empty(0, dtype=torch.uint8) for _ in range(_NUM_STAGES)]
        self._events = [torch.cuda.Event() for _ in range(_NUM_STAGES)]  # after the kernels that read them
        self._index = 0

    def take(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        """The next piece, which the caller fills and then gives to kernels. Waits for those that still read it."""
        self._index = (self._index + 1) % _NUM_STAGES
        self._events[self._index].synchronize()
        size = dtype.itemsize
        for each in shape:
            size *= each
        if self._memory[self._index].numel() < size:
            self._memory[self._index] = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        return self._memory[self._index][:size].view(dtype).view(shape)

    def note_read(self) -> None:
        """The kernels that read the newest piece have been launched."""
        self._events[self._index].record()
