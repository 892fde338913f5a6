"""What both workers ask of a GPU beside its work: which one it is, and whether it had room."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from services.common.errors import CapacityError


def gpu_uuid(device: torch.device) -> str:
    """Tells the GPUs of a machine apart in all its processes; empty for a CPU."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""


@contextlib.contextmanager
def naming_what_needs_memory(what: str) -> Iterator[None]:
    """Raises `CapacityError` where a GPU has no room for `what`, which is allocated meanwhile."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        sizes = ". ".join(str(error).split(". ")[1:3])  # what was asked for, and what the GPU has; the rest is advice
        raise CapacityError(f"the GPU has no room for {what}: {sizes}") from error
