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
_RELEASE_INTERVAL_S = 50e-6  # of the waits of a step under way, which has one for each layer
_RELEASE_S = 2.0  # after which such a step has ended
_LATE_RELEASE_INTERVAL_S = 1e-3  # of those of a step that is launched even later


class CudaIpcChannel:
    """See `services.common.channel.Channel`. Use `create` in the attention worker, `map` in the dense one.

    `signal` and `wait` enqueue on torch's current stream. Both processes use the same host memory for the
    flags, so either of them can release both streams.
    """

    kind = "cuda_ipc"
    waited_s = None

    def __init__(self, region: SharedRegion, spec: ChannelSpec, device_pointer: int, *, is_owner: bool) -> None:
        self._region = region
        self.num_waits: int | None = None
        self.is_waiting = False
        self._is_closed = threading.Event()
        self._release: threading.Thread | None = None  # after an abort
        self._release_lock = threading.Lock()  # `abort` comes from any thread, also beside `close`
        self._is_owner = is_owner
        self._device_pointer = device_pointer
        self._host = (ctypes.c_char * HEADER_BYTES).from_buffer(region.memory)
        address = ctypes.addressof(self._host)
        flags = runtime.cudaHostRegisterMapped | runtime.cudaHostRegisterPortable
        _check(runtime.cudaHostRegister(address, HEADER_BYTES, flags))
        self._flags_pointer = int(_check(runtime.cudaHostGetDevicePointer(address, 0)))
        flat = torch.as_tensor(_DeviceMemory(device_pointer, _data_bytes(spec)), device="cuda")
        self.qkv = flat[: spec.qkv_bytes].view(spec.dtype).view(spec.max_tokens, spec.qkv_size)
        offset = _attn_out_offset(spec)
        attn_out = flat[offset : offset + spec.attn_out_bytes]
        self.attn_out = attn_out.view(spec.dtype).view(spec.max_tokens, spec.attn_size)

    @classmethod
    def create(cls, spec: ChannelSpec, epoch: int, attachment_id: int, lane: int) -> Self:
        """Allocates region and flags on the current device; raises `CapacityError` when memory is short."""
        torch.cuda.init()
        error, pointer = runtime.cudaMalloc(_data_bytes(spec))
        if error != runtime.cudaError_t.cudaSuccess:
            free, _ = torch.cuda.mem_get_info()
            raise CapacityError(f"data region needs {_data_bytes(spec)} bytes of GPU memory, {free} are free")
        handle = _check(runtime.cudaIpcGetMemHandle(pointer))
        region = SharedRegion.create(HEADER_BYTES, epoch, attachment_id, lane)
        region.memory[_IPC_HANDLE_OFFSET : _IPC_HANDLE_OFFSET + _IPC_HANDLE_BYTES] = bytes(handle.reserved)
        return cls(region, spec, int(pointer), is_owner=True)

    @classmethod
    def map(cls, handle: bytes, spec: ChannelSpec, epoch: int, attachment_id: int) -> Self:
        """Maps the peer's region; raises `StaleEpoch` for another one, `PeerError` without peer access."""
        torch.cuda.init()
        region = SharedRegion.open(handle.decode(), HEADER_BYTES, epoch, attachment_id)
        ipc_handle = runtime.cudaIpcMemHandle_t()
        ipc_handle.reserved = region.memory[_IPC_HANDLE_OFFSET : _IPC_HANDLE_OFFSET + _IPC_HANDLE_BYTES]
        pointer = _check(runtime.cudaIpcOpenMemHandle(ipc_handle, runtime.cudaIpcMemLazyEnablePeerAccess))
        return cls(region, spec, int(pointer), is_owner=False)

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
        """See `Channel.abort`. A thread then keeps releasing waits, since steps may still be launched, until `close`.

        Each side does so for itself: the one that aborted first may be dead by now.
        """
        self._region.abort()
        with self._release_lock:
            if self._release is None and not self._is_closed.is_set():
                self._release = threading.Thread(target=self._release_waits, name="release", daemon=True)
                self._release.start()

    def close(self) -> None:
        """See `Channel.close`. The device must be done with the region."""
        torch.cuda.synchronize()
        with self._release_lock:
            self._is_closed.set()
        if self._release is not None:
            self._release.join()
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
        late = time.monotonic() + _RELEASE_S
        words = self._region.words
        while not self._is_closed.is_set():
            for flag in Flag:
                words[flag_word(flag)] = 1
            time.sleep(_RELEASE_INTERVAL_S if time.monotonic() < late else _LATE_RELEASE_INTERVAL_S)


class _DeviceMemory:
    """Bytes of the device, as torch takes them in without owning them."""

    def __init__(self, pointer: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (pointer, False),
            "version": 3,
        }


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
