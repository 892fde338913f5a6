"""`WeightMemory`: one piece of memory for all weights of a model, which other processes can map, too.

It exists as long as any process maps it or has its descriptor open. So a worker that takes over finds the weights in
place, and a standby needs no second copy.
"""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Callable, Iterable
from typing import Self, TypeAlias

import torch

from services.channel import align_up
from services.common.errors import CapacityError
from services.common.process import available_bytes

Empty: TypeAlias = Callable[[tuple[int, ...], torch.dtype], torch.Tensor]  # makes an uninitialised tensor

ALIGNMENT = 512  # bytes, of each tensor, as of those that torch's allocator for CUDA gives


class WeightMemory:
    """`empty` gives tensors one after the other, so that whoever asks for the same ones finds them at the same places.

    Nobody writes to it once it is filled: on a GPU such a write fails, on a CPU it stays within the process.
    """

    def __init__(self, buffer: torch.Tensor) -> None:
        """`buffer`: uint8 [num_bytes]."""
        self._buffer = buffer
        self._num_used = 0

    @classmethod
    def create(cls, num_bytes: int, device: torch.device) -> tuple[Self, int]:
        """New memory and its descriptor, which the caller closes.

        Raises `CapacityError` if there is not enough, and `DeviceError` if the GPU's driver cannot share it.
        """
        if device.type == "cpu":
            buffer, descriptor = _create_host_memory(num_bytes)
        else:
            from services.dense_worker.model.gpu_memory import create_gpu_memory  # needs cuda-bindings

            buffer, descriptor = create_gpu_memory(num_bytes, device)
        return cls(buffer), descriptor

    @classmethod
    def map(cls, descriptor: int, num_bytes: int, device: torch.device) -> Self:
        """Maps memory that another process has created. The caller closes the descriptor. Raises `DeviceError`."""
        if device.type == "cpu":
            private = mmap.mmap(descriptor, num_bytes, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
            return cls(torch.frombuffer(private, dtype=torch.uint8))
        from services.dense_worker.model.gpu_memory import map_gpu_memory

        return cls(map_gpu_memory(descriptor, num_bytes, device))

    @property
    def num_bytes(self) -> int:
        """Its size."""
        return self._buffer.nbytes

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """The next tensor."""
        begin, num_bytes = self._num_used, math.prod(shape) * dtype.itemsize
        self._num_used += align_up(num_bytes, ALIGNMENT)
        assert self._num_used <= self.num_bytes, f"{self._num_used} bytes of weights in {self.num_bytes}"
        return self._buffer[begin : begin + num_bytes].view(dtype).view(shape)

    def holds(self, tensors: Iterable[torch.Tensor]) -> bool:
        """Whether all these tensors lie here."""
        pointer = self._buffer.untyped_storage().data_ptr()
        return all(tensor.untyped_storage().data_ptr() == pointer for tensor in tensors)

    def checksum(self) -> int:
        """The sum of its 64-bit words. Waits for the device."""
        return int(self._buffer.view(torch.int64).sum())


class WeightLayout:
    """The tensors that a model asks for, without memory: `empty` for the meta device."""

    def __init__(self) -> None:
        self.num_bytes = 0  # what they need in a `WeightMemory`
        self.tensors: list[tuple[tuple[int, ...], torch.dtype]] = []

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A tensor on the meta device."""
        self.tensors.append((shape, dtype))
        self.num_bytes += align_up(math.prod(shape) * dtype.itemsize, ALIGNMENT)
        return torch.empty(shape, dtype=dtype, device="meta")


def _create_host_memory(num_bytes: int) -> tuple[torch.Tensor, int]:
    available = available_bytes()
    if num_bytes > available:
        raise CapacityError(f"the weights need {num_bytes} bytes of host memory, {available} are available")
    descriptor = os.memfd_create("weights")
    os.truncate(descriptor, num_bytes)
    return torch.frombuffer(mmap.mmap(descriptor, num_bytes), dtype=torch.uint8), descriptor
