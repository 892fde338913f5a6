"""Helpers for GPUs that both workers use: a GPU's identity, and a clear error when its memory is full."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from services.common.errors import CapacityError

_CUDA_ERROR_MEMORY_ALLOCATION = 2  # cudaErrorMemoryAllocation
_MEMORY_ERRORS = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED")


def gpu_uuid(device: torch.device) -> str:
    """The UUID of a GPU, the same in all processes; empty for a CPU."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""


@contextlib.contextmanager
def naming_what_needs_memory(what: str) -> Iterator[None]:
    """A context for allocating `what`. Raises `CapacityError` with this name if the GPU has no room."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        sizes = ". ".join(str(error).split(". ")[1:3])  # requested and available memory; the rest is advice
        raise CapacityError(f"the GPU has no room for {what}: {sizes}") from error
    except torch.AcceleratorError as error:  # of the driver's own allocations, as for graphs
        if getattr(error, "error_code", None) != _CUDA_ERROR_MEMORY_ALLOCATION:
            raise
        raise CapacityError(f"the GPU has no room for {what}: {str(error).partition(chr(10))[0]}") from error
    except RuntimeError as error:  # of Triton and cuBLAS
        if not any(each in str(error) for each in _MEMORY_ERRORS):
            raise
        raise CapacityError(f"the GPU has no room for {what}: {str(error).partition(chr(10))[0]}") from error
