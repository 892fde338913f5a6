"""The CUDA device of this process, with the properties that engine plans depend on."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch

from services.common.errors import ConfigError

DRIVER_VERSION_FILE = Path("/sys/module/nvidia/version")


@dataclass(frozen=True, slots=True)
class Gpu:
    """A CUDA device."""

    name: str
    capability: tuple[int, int]  # compute capability, major and minor
    num_sms: int  # SMs that this process may use; under an MPS limit fewer than the device has
    driver: str = ""  # see `driver_version`


def current_gpu(device: torch.device) -> Gpu | None:
    """The properties of `device`; None if it is not an available CUDA device."""
    if device.type != "cuda" or (device.index or 0) >= torch.cuda.device_count():
        return None
    properties = torch.cuda.get_device_properties(device)
    capability = (properties.major, properties.minor)
    return Gpu(properties.name, capability, properties.multi_processor_count, driver_version())


def driver_version() -> str:
    """The greatest CUDA version that the driver supports and, where the kernel tells it, the driver's own version."""
    from cuda.bindings import runtime  # comes with torch's CUDA build

    error, version = runtime.cudaDriverGetVersion()
    is_known = error == runtime.cudaError_t.cudaSuccess
    cuda = f"CUDA {version // 1000}.{version % 1000 // 10}" if is_known else "CUDA"
    try:
        return f"{cuda}, driver {DRIVER_VERSION_FILE.read_text().strip()}"
    except OSError:  # not every container shows it
        return cuda


def check_driver() -> None:
    """Raises ConfigError, with CUDA's reason, if this process cannot use the current GPU."""
    try:
        torch.cuda.synchronize()
    except (RuntimeError, AssertionError) as error:  # torch without CUDA raises AssertionError
        raise ConfigError(f"CUDA does not work in this process: {str(error).splitlines()[0]}") from error


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """A context in which `device` is this thread's current CUDA device, which TensorRT uses."""
    return torch.cuda.device(device) if current_gpu(device) is not None else nullcontext()


def free_bytes(device: torch.device) -> int:
    """Memory of a CUDA device that no process uses; 0 on a CPU."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0


def synchronize() -> None:
    """Waits for all work on the device; never called within a step."""
    torch.cuda.synchronize()


def current_stream() -> int:
    """The handle of the CUDA stream that torch uses now."""
    return torch.cuda.current_stream().cuda_stream


def is_capturing() -> bool:
    """Whether torch's current stream is being captured as a CUDA graph."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
