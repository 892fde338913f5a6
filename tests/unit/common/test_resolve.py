"""The errors at start-up for a GPU that is too small, too old or missing."""

from __future__ import annotations

import pytest
import torch

from services.common import resolve
from services.common.errors import CapacityError, ConfigError
from services.common.gpu import naming_what_needs_memory
from services.common.resolve import resolve_device

# The message of torch 2.11 on an H200.
OUT_OF_MEMORY = (
    "CUDA out of memory. Tried to allocate 172.00 MiB. GPU 0 has a total capacity of 139.81 GiB of which 61.25 MiB is "
    "free. Including non-PyTorch memory, this process has 139.74 GiB memory in use. Of the allocated memory 138.8 GiB "
    "is allocated by PyTorch, and 12.5 MiB is reserved by PyTorch but unallocated."
)


def test_an_out_of_memory_error_names_the_purpose_and_the_sizes() -> None:
    sizes = r"no room for the weights: .*172\.00 MiB\. GPU 0 .*139\.81 GiB .*61\.25 MiB is free$"
    with pytest.raises(CapacityError, match=sizes), naming_what_needs_memory("the weights"):
        raise torch.OutOfMemoryError(OUT_OF_MEMORY)


def test_memory_that_the_driver_lacks_is_named_too() -> None:
    """As in a capture: torch's allocator raises `OutOfMemoryError`, the driver's own allocations do not."""
    full = r"^the GPU has no room for the CUDA graphs: CUDA error: out of memory$"
    with pytest.raises(CapacityError, match=full), naming_what_needs_memory("the CUDA graphs"):
        raise accelerator_error("CUDA error: out of memory\nCUDA kernel errors might be reported later", 2)


def test_other_errors_stay_unchanged() -> None:
    with pytest.raises(RuntimeError, match="illegal"), naming_what_needs_memory("the weights"):
        raise RuntimeError("an illegal memory access")
    with pytest.raises(torch.AcceleratorError, match="illegal"), naming_what_needs_memory("the weights"):
        raise accelerator_error("CUDA error: an illegal memory access was encountered", 700)


def accelerator_error(message: str, code: int) -> torch.AcceleratorError:
    """As torch raises it, with the code of CUDA's error."""
    error = torch.AcceleratorError(message)
    error.error_code = code
    return error


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two GPUs, of which the second is too old."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: [(9, 0), (6, 1)][index])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "an old GPU")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(resolve, "_is_installed", lambda module: True)


def test_the_error_names_a_gpu_that_is_too_old(two_gpus: None) -> None:
    assert resolve_device("auto") == resolve_device("cuda") == torch.device("cuda", 0)
    with pytest.raises(ConfigError, match=r"an old GPU, device 'cuda:1', has compute capability 6\.1, 8\.0 or later"):
        resolve_device("cuda:1")


@pytest.mark.parametrize(
    ("module", "message"),
    [
        ("triton", "device 'auto' needs triton, which is not installed; torch's CUDA build brings it"),
        ("cuda.bindings", "device 'auto' needs cuda-bindings, which is not installed"),
    ],
)
def test_the_error_names_a_missing_package(
    module: str, message: str, two_gpus: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resolve, "_is_installed", lambda other: other != module)
    with pytest.raises(ConfigError, match=message):
        resolve_device("auto")


def test_the_error_names_a_torch_that_is_not_built_for_cuda(two_gpus: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(ConfigError, match=r"device 'cuda' needs a torch for CUDA, torch \S+ is for something else"):
        resolve_device("cuda")


@pytest.mark.parametrize(("module", "is_there"), [("grpc.aio", True), ("torch.nowhere", False), ("no_parent.x", False)])
def test_installed_modules_are_found(module: str, is_there: bool) -> None:
    assert resolve._is_installed(module) is is_there


def test_the_error_names_a_missing_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert resolve_device("auto") == resolve_device("cpu") == torch.device("cpu")
    with pytest.raises(ConfigError, match=r"device 'cuda' was asked for, torch \S+ sees 0 CUDA devices"):
        resolve_device("cuda")
