"""`CudaIpcChannel`: the seam between two processes on one GPU, or on two that reach each other's memory.

The data region is device memory that the attention worker allocates outside torch's allocator and exports
by CUDA IPC. The flags lie in host memory that both processes register with the driver: stream memory
operations on them can be captured in a graph, and a CPU store releases a wait when the peer is dead.
"""

from __future__ import annotations

import ctypes
import threading
import time
from typing import Any, Self

import torch
from cuda.bindings import driver, runtime

from services.common.channel import ChannelAborted, ChannelSpec, Flag, align_up
from services.common.channel.region import HEADER_BYTES, SharedRegion, flag_word
from services.common.errors import CapacityError, PeerError

_IPC_HANDLE_OFFSET = 2048  # in the region's header
_IPC_HANDLE_BYTES = 64
_ALIGNMENT = 512  # of attn_out within the data region
_RELEASE_INTERVAL_S = 50e-6
_RELEASE_S = 2.0  # longest time to keep releasing waits: a step of any size has ended by then


class CudaIpcChannel:
    """See `services.common.channel.Channel`. Use `create` in the attention worker, `map` in the dense one.

    `signal` and `wait` enqueue on torch's current stream. Both processes use the same host memory for the
    flags, so either of them can release both streams.
    """

    kind = "cuda_ipc"
    waited_s = None

    def __init__(
        self, device: torch.device, region: SharedRegion, spec: ChannelSpec, device_pointer: int, *, is_owner: bool
    ) -> None:
        """`device` is where this process computes, and current; the memory may lie on its peer."""
        self._region = region
        self._device = device
        self.num_waits: int | None = None
        self.is_waiting = False
        self._is_owner = is_owner
        self._device_pointer = device_pointer
        self._host = (ctypes.c_char * HEADER_BYTES).from_buffer(region.memory)
        address = ctypes.addressof(self._host)
        flags = runtime.cudaHostRegisterMapped | runtime.cudaHostRegisterPortable
        _check(runtime.cudaHostRegister(address, HEADER_BYTES, flags))
        self._flags_pointer = int(_check(runtime.cudaHostGetDevicePointer(address, 0)))
        self.qkv = _tensor_at(device_pointer, spec.dtype, (spec.max_tokens, spec.qkv_size), device)
        attn_out_pointer = device_pointer + _attn_out_offset(spec)
        self.attn_out = _tensor_at(attn_out_pointer, spec.dtype, (spec.max_tokens, spec.attn_size), device)

    @classmethod
    def create(cls, device: torch.device, spec: ChannelSpec, epoch: int, attachment_id: int, lane: int) -> Self:
        """Allocates the region on `device`; raises `CapacityError` when memory is short."""
        torch.cuda.init()
        with torch.cuda.device(device):
            error, pointer = runtime.cudaMalloc(_data_bytes(spec))
            if error != runtime.cudaError_t.cudaSuccess:
                free, _ = torch.cuda.mem_get_info()
                raise CapacityError(f"data region needs {_data_bytes(spec)} bytes of GPU memory, {free} are free")
            handle = _check(runtime.cudaIpcGetMemHandle(pointer))
            region = SharedRegion.create(HEADER_BYTES, epoch, attachment_id, lane)
            region.memory[_IPC_HANDLE_OFFSET : _IPC_HANDLE_OFFSET + _IPC_HANDLE_BYTES] = bytes(handle.reserved)
            return cls(device, region, spec, int(pointer), is_owner=True)

    @classmethod
    def map(
        cls, device: torch.device, handle: bytes, spec: ChannelSpec, epoch: int, attachment_id: int
    ) -> Self:
        """Maps the peer's region for work on `device`; raises `StaleEpoch` for another one.

        Raises `PeerError` where `device` has no access to the memory of the peer's GPU.
        """
        torch.cuda.init()
        region = SharedRegion.open(handle.decode(), HEADER_BYTES, epoch, attachment_id)
        ipc_handle = runtime.cudaIpcMemHandle_t()
        ipc_handle.reserved = region.memory[_IPC_HANDLE_OFFSET : _IPC_HANDLE_OFFSET + _IPC_HANDLE_BYTES]
        with torch.cuda.device(device):
            error, pointer = runtime.cudaIpcOpenMemHandle(ipc_handle, runtime.cudaIpcMemLazyEnablePeerAccess)
            if error != runtime.cudaError_t.cudaSuccess:
                region.close()
                raise PeerError(f"{device} cannot map the attention worker's GPU memory: {error.name}")
            return cls(device, region, spec, int(pointer), is_owner=False)

    @property
    def handle(self) -> bytes:
        """What the peer passes to `map`."""
        return self._region.name.encode()

    @property
    def num_bytes(self) -> int:
        """Size of the data region."""
        return _attn_out_offset_of(self) + self.attn_out.nbytes

    def signal(self, flag: Flag) -> None:
        """Enqueues the write that lets the peer's stream go on, after all work enqueued before."""
        stream = torch.cuda.current_stream().cuda_stream
        _check(driver.cuStreamWriteValue32(stream, self._address(flag), 1, 0))

    def wait(self, flag: Flag) -> None:
        """Enqueues a wait for 1, and the write of 0 that makes the flag ready for its next use."""
        stream = torch.cuda.current_stream().cuda_stream
        equal = driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_EQ
        _check(driver.cuStreamWaitValue32(stream, self._address(flag), 1, equal))
        _check(driver.cuStreamWriteValue32(stream, self._address(flag), 0, 0))

    def check(self) -> None:
        """See `Channel.check`."""
        if self._region.is_aborted:
            raise ChannelAborted("the peer went away in the middle of a step")

    def add_errors(self, count: int) -> None:
        """See `Channel.add_errors`."""
        self._region.add_errors(count)

    @property
    def num_errors(self) -> int:
        """See `Channel.num_errors`."""
        return self._region.num_errors

    def abort(self) -> None:
        """See `Channel.abort`. A thread then keeps releasing waits until both streams must have run through."""
        if not self._region.is_aborted:
            self._region.abort()
            threading.Thread(target=self._release_waits, name="release", daemon=True).start()

    def close(self) -> None:
        """See `Channel.close`. The device must be done with the region."""
        with torch.cuda.device(self._device):
            torch.cuda.synchronize()
            del self.qkv, self.attn_out
            _check(runtime.cudaHostUnregister(ctypes.addressof(self._host)))
            del self._host
            if self._is_owner:
                _check(runtime.cudaFree(self._device_pointer))
            else:
                _check(runtime.cudaIpcCloseMemHandle(self._device_pointer))
        self._region.close()

    def _address(self, flag: Flag) -> int:
        return self._flags_pointer + flag_word(flag) * 8

    def _release_waits(self) -> None:
        end = time.monotonic() + _RELEASE_S
        words = memoryview(self._region.memory)[:HEADER_BYTES].cast("Q")  # its own: outlives `close`
        while time.monotonic() < end:
            for flag in Flag:
                words[flag_word(flag)] = 1
            time.sleep(_RELEASE_INTERVAL_S)
        words.release()


def _tensor_at(pointer: int, dtype: torch.dtype, shape: tuple[int, int], device: torch.device) -> torch.Tensor:
    """A tensor over memory that torch does not own. It passes for one on `device`, even where the memory lies on
    a peer: any public way would take the memory's own device, and kernels of `device` would refuse it.
    """
    num_bytes = shape[0] * shape[1] * dtype.itemsize
    storage = torch._C._construct_storage_from_data_pointer(pointer, device, num_bytes)
    return torch.empty(0, dtype=dtype, device=device).set_(storage, 0, shape, (shape[1], 1))


def _attn_out_offset(spec: ChannelSpec) -> int:
    return align_up(spec.qkv_bytes, _ALIGNMENT)


def _attn_out_offset_of(channel: CudaIpcChannel) -> int:
    return align_up(channel.qkv.nbytes, _ALIGNMENT)


def _data_bytes(spec: ChannelSpec) -> int:
    return _attn_out_offset(spec) + align_up(spec.attn_out_bytes, _ALIGNMENT)


def _check(result: tuple[Any, ...]) -> Any:
    """The value of a CUDA call; raises `PeerError` naming the error."""
    error, *values = result
    if int(error) != 0:
        raise PeerError(f"CUDA call failed: {error.name}")
    return values[0] if values else None
