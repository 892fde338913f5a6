"""Memory of a GPU behind a file descriptor: the driver's virtual memory management.

Memory that a descriptor or a mapping of any process refers to exists on, also when the process that made it was killed,
and under MPS, too (seen on an H200; CUDA's older IPC handles are valid only as long as the owner lives).
"""

from __future__ import annotations

from typing import Any

import torch
from cuda.bindings import driver

from services.channel.cuda_flags import check
from services.common.errors import CapacityError

_DESCRIPTOR = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
_ON_DEVICE = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
_PINNED = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
_GRANULARITY = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED
_READ = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READ
_READ_AND_WRITE = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE


class _Bytes:
    """What torch needs to know of memory that it does not own."""

    def __init__(self, pointer: int, num_bytes: int) -> None:
        place = {"shape": (num_bytes,), "typestr": "|u1", "data": (pointer, False)}
        self.__cuda_array_interface__ = {**place, "version": 3}


def create_gpu_memory(num_bytes: int, device: torch.device) -> tuple[torch.Tensor, int]:
    """New memory as a tensor, uint8 [num_bytes], and its descriptor. It is mapped until the process ends.

    Raises `CapacityError` if the GPU has no room, and `DeviceError` if the driver cannot share memory this way.
    """
    properties = driver.CUmemAllocationProp()
    properties.type, properties.requestedHandleTypes = _PINNED, _DESCRIPTOR
    properties.location.type, properties.location.id = _ON_DEVICE, _index(device)
    size = _whole_size(num_bytes, properties)
    error, handle = driver.cuMemCreate(size, properties, 0)
    if error == driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
        free, _ = torch.cuda.mem_get_info(device)
        raise CapacityError(f"the GPU has no room for the weights: they need {size} bytes, {free} are free")
    check((error,))
    descriptor = check(driver.cuMemExportToShareableHandle(handle, _DESCRIPTOR, 0))
    return _map(handle, num_bytes, size, device, _READ_AND_WRITE), int(descriptor)


def map_gpu_memory(descriptor: int, num_bytes: int, device: torch.device) -> torch.Tensor:
    """The memory behind a descriptor as a tensor, uint8 [num_bytes], to be read. It is mapped until the process ends.

    Raises `DeviceError`.
    """
    properties = driver.CUmemAllocationProp()
    properties.type, properties.requestedHandleTypes = _PINNED, _DESCRIPTOR
    properties.location.type, properties.location.id = _ON_DEVICE, _index(device)
    handle = check(driver.cuMemImportFromShareableHandle(descriptor, _DESCRIPTOR))
    return _map(handle, num_bytes, _whole_size(num_bytes, properties), device, _READ)


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


def _whole_size(num_bytes: int, properties: Any) -> int:
    granularity = int(check(driver.cuMemGetAllocationGranularity(properties, _GRANULARITY)))
    return -(-num_bytes // granularity) * granularity


def _map(handle: Any, num_bytes: int, size: int, device: torch.device, flags: Any) -> torch.Tensor:
    pointer = check(driver.cuMemAddressReserve(size, 0, 0, 0))
    check(driver.cuMemMap(pointer, size, 0, handle, 0))
    check(driver.cuMemRelease(handle))  # the mapping keeps the memory
    access = driver.CUmemAccessDesc()
    access.location.type, access.location.id, access.flags = _ON_DEVICE, _index(device), flags
    check(driver.cuMemSetAccess(pointer, size, [access], 1))
    return torch.as_tensor(_Bytes(int(pointer), num_bytes), device=device)
