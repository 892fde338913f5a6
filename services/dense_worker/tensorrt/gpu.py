"""The CUDA device of this process, with the properties that engine plans depend on."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Gpu:
    """A CUDA device."""

    name: str
    capability: tuple[int, int]  # compute capability, major and minor
    num_sms: int  # SMs that this process may use; under an MPS limit fewer than the device has


def current_gpu(device: torch.device) -> Gpu | None:
    """The properties of `device`; None if it is not an available CUDA device."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return None
    properties = torch.cuda.get_device_properties(device)
    return Gpu(properties.name, (properties.major, properties.minor), properties.multi_processor_count)


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """A context in which `device` is this thread's current CUDA device, which TensorRT uses."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def synchronize() -> None:
    """Waits for all work on the device; never called within a step."""
    torch.cuda.synchronize()


def current_stream() -> int:
    """The handle of the CUDA stream that torch uses now."""
    return torch.cuda.current_stream().cuda_stream
