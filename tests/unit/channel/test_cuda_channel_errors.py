"""A CUDA channel whose creation fails leaves nothing behind, and what moves its rows between two GPUs.

The driver is simulated; `tests/gpu` uses a real one.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import sys
from collections.abc import Iterator
from enum import IntEnum
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from services.channel import ChannelSpec, Flag
from services.channel.region import HEADER_BYTES, NAME_PREFIX, SHM_DIR, SharedRegion
from services.common.errors import CapacityError, ConfigError, DeviceError, PeerError

EPOCH = 0x5EA1_ED5E_0000_0003
DEVICE = torch.device("cuda", 0)
SPEC = ChannelSpec(max_tokens=2, qkv_size=12, attn_size=4, dtype=torch.bfloat16)
MODULES = ("services.channel.cuda_flags", "services.channel.cuda_ipc")
POINTER = 1 << 20
UUID = "12345678-9abc-def0-1234-56789abcdef0"


class Error(IntEnum):
    cudaSuccess = 0
    cudaErrorMemoryAllocation = 2
    cudaErrorMapBufferObjectFailed = 205
    cudaErrorPeerAccessUnsupported = 217
    CUDA_ERROR_INVALID_PTX = 218
    cudaErrorInvalidResourceHandle = 400


class Driver:
    """Tracks what is allocated, mapped and registered. Refuses all kernels, and stores their PTX."""

    cudaError_t = Error
    cudaHostRegisterMapped = cudaHostRegisterPortable = cudaIpcMemLazyEnablePeerAccess = 0
    CUfunction_attribute = SimpleNamespace(CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT=9)

    def __init__(self) -> None:
        self.held: list[str] = []
        self.ptx = ""
        self.mapping_error = Error.cudaSuccess

    def cudaMalloc(self, num_bytes: int) -> tuple[Error, int]:
        self.held.append("memory")
        return Error.cudaSuccess, POINTER

    def cudaFree(self, pointer: int) -> tuple[Error]:
        self.held.remove("memory")
        return (Error.cudaSuccess,)

    def cudaIpcOpenMemHandle(self, handle: object, flags: int) -> tuple[Error, int]:
        if self.mapping_error is Error.cudaSuccess:
            self.held.append("mapping")
        return self.mapping_error, POINTER

    def cudaIpcCloseMemHandle(self, pointer: int) -> tuple[Error]:
        self.held.remove("mapping")
        return (Error.cudaSuccess,)

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> tuple[Error]:
        self.held.append("page")
        return (Error.cudaSuccess,)

    def cudaHostUnregister(self, address: int) -> tuple[Error]:
        self.held.remove("page")
        return (Error.cudaSuccess,)

    def cudaHostGetDevicePointer(self, address: int, flags: int) -> tuple[Error, int]:
        return Error.cudaSuccess, address

    def cudaMemset(self, pointer: int, value: int, num_bytes: int) -> tuple[Error]:
        return (Error.cudaSuccess,)

    def cudaStreamSynchronize(self, stream: int) -> tuple[Error]:
        return (Error.cudaSuccess,)

    def cudaIpcMemHandle_t(self) -> SimpleNamespace:
        return SimpleNamespace(reserved=b"")

    def cudaIpcGetMemHandle(self, pointer: int) -> tuple[Error, SimpleNamespace]:
        return Error.cudaSuccess, SimpleNamespace(reserved=bytes(64))

    def cuModuleLoadData(self, address: int) -> tuple[Error]:
        self.ptx = ctypes.string_at(address).decode()
        return (Error.CUDA_ERROR_INVALID_PTX,)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Driver]:
    driver = getattr(request, "param", Driver)()
    bindings: Any = ModuleType("cuda.bindings")
    bindings.driver = bindings.runtime = driver
    monkeypatch.setitem(sys.modules, "cuda", ModuleType("cuda"))
    monkeypatch.setitem(sys.modules, "cuda.bindings", bindings)
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=UUID))
    real = {name: sys.modules.pop(name, None) for name in MODULES}
    yield driver
    for name in MODULES:
        del sys.modules[name]
    sys.modules.update({name: module for name, module in real.items() if module is not None})


def make_region(cuda_ipc: Any, gpu: str) -> SharedRegion:
    """The region that the attention worker offers for mapping; its memory is on the GPU with this UUID."""
    region = SharedRegion.create(HEADER_BYTES, EPOCH, 1, 0)
    cuda_ipc._OFFER.pack_into(region.memory, cuda_ipc._OFFER_OFFSET, bytes(64), gpu.encode())
    return region


def num_regions() -> int:
    return len(list(SHM_DIR.glob(f"{NAME_PREFIX}{EPOCH:016x}-*")))


def test_a_failed_creation_of_a_channel_releases_everything(driver: Driver) -> None:
    cuda_ipc = importlib.import_module(MODULES[1])
    with pytest.raises(DeviceError, match="INVALID_PTX"):
        cuda_ipc.CudaIpcChannel.create(DEVICE, cuda_ipc.SPINNING, SPEC, EPOCH, 1, 0)
    assert driver.held == [] and num_regions() == 0


def test_a_failed_mapping_of_a_channel_releases_everything(driver: Driver) -> None:
    cuda_ipc = importlib.import_module(MODULES[1])
    region = make_region(cuda_ipc, UUID)
    with pytest.raises(DeviceError, match="INVALID_PTX"):
        cuda_ipc.CudaIpcChannel.map(DEVICE, cuda_ipc.SPINNING, region.name.encode(), SPEC, EPOCH, 1)
    assert driver.held == []
    region.close()


def test_a_gpu_without_memory_for_copies_from_its_peer_releases_everything(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(shape: tuple[int, int], **options: object) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 16 bytes. GPU 0 is full. Advice.")

    cuda_ipc = importlib.import_module(MODULES[1])
    region = make_region(cuda_ipc, UUID[::-1])
    monkeypatch.setattr(torch, "empty", refuse)
    match = r"no room for copies of what the peer's GPU holds: Tried to allocate 16 bytes\. GPU 0"
    with pytest.raises(CapacityError, match=match):
        cuda_ipc.CudaIpcChannel.map(DEVICE, cuda_ipc.QUEUED, region.name.encode(), SPEC, EPOCH, 1)
    assert driver.held == []
    region.close()


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (Error.cudaErrorPeerAccessUnsupported, ConfigError),  # another try would fail, too
        (Error.cudaErrorMapBufferObjectFailed, ConfigError),
        (Error.cudaErrorInvalidResourceHandle, PeerError),  # the process that created the handle may be dead
    ],
)
def test_the_error_names_memory_that_cannot_be_mapped(driver: Driver, error: Error, cause: type[Exception]) -> None:
    cuda_ipc = importlib.import_module(MODULES[1])
    driver.mapping_error = error
    region = make_region(cuda_ipc, UUID)
    with pytest.raises(cause, match=f"cuda:0 cannot map the attention worker's GPU memory: {error.name}"):
        cuda_ipc.CudaIpcChannel.map(DEVICE, cuda_ipc.QUEUED, region.name.encode(), SPEC, EPOCH, 1)
    assert driver.held == []
    region.close()


def test_the_error_says_why_memory_of_another_container_cannot_be_mapped(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda_ipc = importlib.import_module(MODULES[1])
    driver.mapping_error = Error.cudaErrorInvalidResourceHandle
    region = make_region(cuda_ipc, UUID)
    region.words[2] ^= 1 << 33  # as if its creator had process ids of its own
    with pytest.raises(ConfigError, match=r"InvalidResourceHandle: it is in another container, .*shareProcessNamesp"):
        cuda_ipc.CudaIpcChannel.map(DEVICE, cuda_ipc.QUEUED, region.name.encode(), SPEC, EPOCH, 1)
    assert driver.held == []
    region.close()


@pytest.mark.parametrize(
    ("capability", "target", "has_dependent_launch"),
    [((8, 0), "sm_70", False), ((9, 0), "sm_90", True), ((10, 0), "sm_90", True), ((12, 1), "sm_90", True)],
)
def test_kernels_target_a_gpu_that_their_ptx_version_supports(
    driver: Driver,
    monkeypatch: pytest.MonkeyPatch,
    capability: tuple[int, int],
    target: str,
    has_dependent_launch: bool,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    cuda_flags, _ = map(importlib.import_module, MODULES)
    with pytest.raises(DeviceError, match="INVALID_PTX"):
        cuda_flags.FlagKernels(DEVICE, POINTER, POINTER, queued=None)
    assert ".version 8.0\n" in driver.ptx and f".target {target}\n" in driver.ptx
    assert ("griddepcontrol" in driver.ptx) is has_dependent_launch


class Memory(Driver):
    """The peer's memory is the host's, and what is enqueued on a stream is done at once."""

    cudaMemcpyKind = SimpleNamespace(cudaMemcpyDefault=4)
    CUstreamWaitValue_flags = SimpleNamespace(CU_STREAM_WAIT_VALUE_EQ=1)
    CUstreamBatchMemOpType = SimpleNamespace(
        CU_STREAM_MEM_OP_WAIT_VALUE_32="waitValue", CU_STREAM_MEM_OP_WRITE_VALUE_32="writeValue"
    )

    def __init__(self) -> None:
        super().__init__()
        self.region = torch.zeros(1 << 20, dtype=torch.uint8)
        self.done: list[str] = []

    def cudaIpcOpenMemHandle(self, handle: object, flags: int) -> tuple[Error, int]:
        return super().cudaIpcOpenMemHandle(handle, flags)[0], self.region.data_ptr()

    def cudaMemcpyAsync(self, target: int, source: int, num_bytes: int, kind: int, stream: int) -> tuple[Error]:
        ctypes.memmove(target, source, num_bytes)
        self.done.append(f"copy {num_bytes}")
        return (Error.cudaSuccess,)

    def cuStreamWriteValue32(self, stream: int, address: int, value: int, flags: int) -> tuple[Error]:
        self.done.append(f"write {value}")
        return (Error.cudaSuccess,)

    def CUstreamBatchMemOpParams(self) -> SimpleNamespace:
        return SimpleNamespace(waitValue=SimpleNamespace(), writeValue=SimpleNamespace())

    def cuStreamBatchMemOp(
        self, stream: int, count: int, operations: list[SimpleNamespace], flags: int
    ) -> tuple[Error]:
        assert len(operations) == count
        parts = [(each.operation, getattr(each, each.operation)) for each in operations]
        assert len({part.address for _, part in parts}) == 1
        self.done.append(" ".join(f"{name} {part.value}" for name, part in parts))
        return (Error.cudaSuccess,)


@pytest.mark.parametrize("driver", [Memory], indirect=True)
def test_copy_engines_move_the_rows_of_long_steps_between_two_gpus(
    driver: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=0))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    cuda_ipc = importlib.import_module(MODULES[1])
    spec = ChannelSpec(max_tokens=2048, qkv_size=12, attn_size=4, dtype=torch.bfloat16)
    region = make_region(cuda_ipc, UUID[::-1])
    monkeypatch.setattr(cuda_ipc, "gpu_uuid", lambda device: UUID)
    name = region.name.encode()
    channel = cuda_ipc.CudaIpcChannel.map(torch.device("cpu"), cuda_ipc.QUEUED, name, spec, EPOCH, 1)
    there = driver.region.view(torch.bfloat16)
    qkv, attn_out = there[: 2048 * 12].view(2048, 12), there[2048 * 12 :][: 2048 * 4].view(2048, 4)

    channel.begin_layers(1030)
    channel.qkv[:1030] = 3.0
    assert not qkv.any(), "rows go when the flag is set"
    channel.signal(Flag.LONG_STEP_QKV_READY)
    assert (qkv[:1030] == 3.0).all() and not qkv[1030:].any()
    channel.wait(Flag.ATTENTION_READY)
    attn_out[:1030] = 5.0
    fetched = channel.fetch_attn_out(1030)
    assert (fetched == 5.0).all() and fetched.data_ptr() != attn_out.data_ptr()
    assert driver.done == ["copy 24720", "write 1", "waitValue 1 writeValue 0", "copy 8240"]

    channel.begin_layers(8)  # a short step: its products write to the peer, and a kernel fetches
    channel.qkv[:8] = 7.0
    assert (qkv[:8] == 7.0).all() and (qkv[8:1030] == 3.0).all()
    channel.signal(Flag.QKV_READY)
    assert (channel.fetch_attn_out(8) == 5.0).all()
    assert driver.done[4:] == ["write 1"]
    del qkv, attn_out, there, fetched
    channel.close()
    region.close()


@pytest.mark.parametrize("driver", [Memory], indirect=True)
@pytest.mark.parametrize("max_tokens", [1023, 1024])
def test_rows_that_no_copy_engine_moves_have_no_memory_beside_the_peers(
    driver: Memory, monkeypatch: pytest.MonkeyPatch, max_tokens: int
) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    cuda_ipc = importlib.import_module(MODULES[1])
    monkeypatch.setattr(cuda_ipc, "gpu_uuid", lambda device: UUID)
    spec = ChannelSpec(max_tokens=max_tokens, qkv_size=12, attn_size=4, dtype=torch.bfloat16)
    region, made, empty = make_region(cuda_ipc, UUID[::-1]), list[object](), torch.empty
    monkeypatch.setattr(torch, "empty", lambda shape, **options: made.append(shape) or empty(shape, **options))
    name = region.name.encode()
    channel = cuda_ipc.CudaIpcChannel.map(torch.device("cpu"), cuda_ipc.QUEUED, name, spec, EPOCH, 1)
    copies = [shape for shape in made if shape != 0]  # 0: what gets the peer's memory
    assert copies == [(max_tokens, 4), (max_tokens, 12)][: 1 if max_tokens < 1024 else 2]
    channel.begin_layers(max_tokens)
    assert (channel.qkv.data_ptr() == driver.region.data_ptr()) is (max_tokens < 1024)
    channel.close()
    region.close()
