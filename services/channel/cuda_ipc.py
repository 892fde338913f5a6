"""`CudaIpcChannel`: the seam between two processes on one GPU, or on two GPUs that can access each other's memory.

The data region is device memory that the attention worker allocates outside torch's allocator and exports
by CUDA IPC. In addition, both processes register a page of host memory with the driver: a CPU can write to it and
end all waits when the peer is dead.
"""

from __future__ import annotations

import contextlib
import ctypes
import struct
from typing import Self

import torch
from cuda.bindings import runtime

from services.channel import QUEUED, SPINNING, ChannelSpec, Flag, align_up
from services.channel.cuda_flags import (
    FLAG_BYTES,
    CudaFlags,
    FlagKernels,
    StreamMemoryOperations,
    check,
)
from services.channel.cuda_slots import SlotAddresses
from services.channel.region import ABORT_WORD, HEADER_BYTES, WORD_BYTES, RegionChannel, SharedRegion, flag_word
from services.common.errors import CapacityError, ConfigError, PeerError
from services.common.gpu import gpu_uuid, naming_what_needs_memory

_OFFER = struct.Struct("64s36s")  # the memory's IPC handle, and the UUID of its GPU
_OFFER_OFFSET = 2048  # offset of the offer in the region's header
_NO_PEER_ACCESS = (
    runtime.cudaError_t.cudaErrorPeerAccessUnsupported,
    runtime.cudaError_t.cudaErrorMapBufferObjectFailed,
)
_HIDDEN = (
    ": it is in another container, and CUDA shares memory between processes that see each other: put both into one"
    " container, or into one pod with shareProcessNamespace"
)
_NUM_FLAG_BYTES = len(Flag) * FLAG_BYTES
# From this many tokens on, copying a peer's memory first is faster: a matrix product reads its input once per tile,
# and reads from a peer are not cached. Measured by `bench/seam.py` on two GPUs.
_COPIED_FROM_TOKENS = 5
# From this many tokens on, copy engines move the rows of lanes on two GPUs. That takes longer than by kernels, but
# another lane has work for all multiprocessors meanwhile.
_COPIED_BY_ENGINES_FROM_TOKENS = 1024
_ALIGNMENT = 512  # bytes; of attn_out and the flags within the data region


def choose_kind(device: torch.device, peer_gpu: str, num_lanes: int = 1) -> str:
    """The faster kind between this process on `device` and a peer on the GPU with the UUID `peer_gpu`.

    Processes that share one GPU without MPS take turns on it; they must not spend their turns polling. Nor must a lane
    on two GPUs: another lane has work for the whole GPU meanwhile.
    """
    if peer_gpu != gpu_uuid(device):
        return SPINNING if num_lanes == 1 else QUEUED
    attribute = runtime.cudaDeviceAttr.cudaDevAttrMpsEnabled
    has_mps = check(runtime.cudaDeviceGetAttribute(attribute, device.index))
    return SPINNING if has_mps else QUEUED


class CudaIpcChannel(RegionChannel):
    """A `Channel` in GPU memory. The attention worker calls `create`, the dense worker `map`.

    `signal` and `wait` enqueue on torch's current stream. Either process can release both streams.
    """

    waited_s = None

    def __init__(
        self,
        device: torch.device,
        kind: str,
        region: SharedRegion,
        spec: ChannelSpec,
        device_pointer: int,
        *,
        is_owner: bool,
        lies_on_peer: bool = False,
    ) -> None:
        """`device` is the GPU of this process and current; the memory may lie on a peer GPU."""
        super().__init__(region)
        self.kind = kind
        self._device = device
        self.num_waits: int | None = None
        self._is_owner = is_owner
        self._device_pointer = device_pointer
        self._flags_pointer = device_pointer + _flags_offset(spec)
        attn_out_pointer = device_pointer + _attn_out_offset(spec)
        attn_out_shape = (spec.max_tokens, spec.attn_size)
        qkv_shape = (spec.max_tokens, spec.qkv_size)
        # Of the step whose layers are run, enqueued or captured; 0: it writes its rows where they are read.
        self._num_copied_rows = 0
        with naming_what_needs_memory("copies of what the peer's GPU holds"):
            self._local_attn_out = self._local_qkv = None
            if lies_on_peer:
                self._local_attn_out = torch.empty(attn_out_shape, dtype=spec.dtype, device=device)
            if lies_on_peer and kind == QUEUED and spec.max_tokens >= _COPIED_BY_ENGINES_FROM_TOKENS:
                self._local_qkv = torch.empty(qkv_shape, dtype=spec.dtype, device=device)
        self._host = (ctypes.c_char * HEADER_BYTES).from_buffer(region.memory)
        address = ctypes.addressof(self._host)
        flags = runtime.cudaHostRegisterMapped | runtime.cudaHostRegisterPortable
        check(runtime.cudaHostRegister(address, HEADER_BYTES, flags))
        try:
            header_pointer = self._header_pointer = int(check(runtime.cudaHostGetDevicePointer(address, 0)))
            self._flags = _make_flags(kind, device, region, header_pointer, self._flags_pointer)
        except BaseException:
            runtime.cudaHostUnregister(address)
            raise
        self._region_qkv = _tensor_at(device_pointer, spec.dtype, qkv_shape, device)
        self.qkv = self._region_qkv
        self.attn_out = _tensor_at(attn_out_pointer, spec.dtype, attn_out_shape, device)

    @classmethod
    def create(
        cls, device: torch.device, kind: str, spec: ChannelSpec, epoch: int, attachment_id: int, lane: int
    ) -> Self:
        """Allocates a region on `device`; `kind` is one of CUDA_KINDS. Raises `CapacityError` when memory is short."""
        torch.cuda.init()
        with torch.cuda.device(device), contextlib.ExitStack() as undo:
            error, pointer = runtime.cudaMalloc(_data_bytes(spec))
            if error == runtime.cudaError_t.cudaErrorMemoryAllocation:
                free, _ = torch.cuda.mem_get_info()
                raise CapacityError(f"data region needs {_data_bytes(spec)} bytes of GPU memory, {free} are free")
            check((error,))
            undo.callback(runtime.cudaFree, pointer)
            check(runtime.cudaMemset(int(pointer) + _flags_offset(spec), 0, _NUM_FLAG_BYTES))
            check(runtime.cudaStreamSynchronize(0))
            handle = check(runtime.cudaIpcGetMemHandle(pointer))
            region = SharedRegion.create(HEADER_BYTES, epoch, attachment_id, lane)
            undo.callback(region.close)
            _OFFER.pack_into(region.memory, _OFFER_OFFSET, bytes(handle.reserved), gpu_uuid(device).encode())
            channel = cls(device, kind, region, spec, int(pointer), is_owner=True)
            undo.pop_all()
            return channel

    @classmethod
    def map(
        cls, device: torch.device, kind: str, handle: bytes, spec: ChannelSpec, epoch: int, attachment_id: int
    ) -> Self:
        """Maps the peer's region, which has the given `kind`, for work on `device`.

        Raises `StaleEpoch` if the region's epoch or attachment is not the expected one, `ConfigError` if `device`
        cannot access the memory of the peer's GPU, and `CapacityError` if `device` has no room for the copies.
        """
        torch.cuda.init()
        with torch.cuda.device(device), contextlib.ExitStack() as undo:
            region = SharedRegion.open(handle.decode(), HEADER_BYTES, epoch, attachment_id)
            undo.callback(region.close)
            ipc_handle = runtime.cudaIpcMemHandle_t()
            ipc_handle.reserved, gpu = _OFFER.unpack_from(region.memory, _OFFER_OFFSET)
            lies_on_peer = gpu.decode() != gpu_uuid(device)
            error, pointer = runtime.cudaIpcOpenMemHandle(ipc_handle, runtime.cudaIpcMemLazyEnablePeerAccess)
            if error != runtime.cudaError_t.cudaSuccess:
                cause, mend = PeerError, ""  # the peer may just have died
                if region.is_of_hidden_process:
                    cause, mend = ConfigError, _HIDDEN
                elif error in _NO_PEER_ACCESS:
                    cause, mend = ConfigError, ": put both workers on one GPU, or on two that are linked"
                raise cause(f"{device} cannot map the attention worker's GPU memory: {error.name}{mend}")
            undo.callback(runtime.cudaIpcCloseMemHandle, int(pointer))
            channel = cls(device, kind, region, spec, int(pointer), is_owner=False, lies_on_peer=lies_on_peer)
            undo.pop_all()
            return channel

    @property
    def slot_addresses(self) -> SlotAddresses:
        """Where kernels find the region and its flags, of a channel whose flags are polled."""
        assert self.kind == SPINNING, "kernels poll"
        return SlotAddresses(
            qkv=self._device_pointer,
            attn_out=self.attn_out.data_ptr(),
            qkv_ready=self._flags_pointer + Flag.QKV_READY * FLAG_BYTES,
            long_qkv_ready=self._header_pointer + flag_word(Flag.LONG_STEP_QKV_READY) * WORD_BYTES,
            attention_ready=self._flags_pointer + Flag.ATTENTION_READY * FLAG_BYTES,
            abort=self._header_pointer + ABORT_WORD * WORD_BYTES,
        )

    def begin_layers(self, num_rows: int) -> None:
        """Chooses where qkv is written."""
        is_copied = self._local_qkv is not None and num_rows >= _COPIED_BY_ENGINES_FROM_TOKENS
        self._num_copied_rows = num_rows if is_copied else 0
        self.qkv = self._local_qkv if is_copied else self._region_qkv

    def signal(self, flag: Flag) -> None:
        """Enqueues setting the flag on torch's current stream, and before that the copy of qkv, if there is one."""
        if self._num_copied_rows and flag is not Flag.ATTENTION_READY:
            _copy_by_engine(self._region_qkv[: self._num_copied_rows], self.qkv[: self._num_copied_rows])
        self._flags.signal(flag)

    def wait(self, flag: Flag) -> None:
        """Enqueues a wait for the flag on torch's current stream."""
        self._flags.wait(flag)

    def fetch_attn_out(self, num_tokens: int) -> torch.Tensor:
        """The first rows of `attn_out`. Enqueues a copy if the memory lies on a peer GPU and the rows are many."""
        attn_out = self.attn_out[:num_tokens]
        if self._local_attn_out is None or num_tokens < _COPIED_FROM_TOKENS:
            return attn_out
        if self._num_copied_rows:
            return _copy_by_engine(self._local_attn_out[:num_tokens], attn_out)
        # A multiplication is a kernel. `copy_` would become a copy node in the CUDA graph, which takes 10 µs longer.
        return torch.mul(attn_out, 1.0, out=self._local_attn_out[:num_tokens])

    def abort(self) -> None:
        """Sets the abort mark and releases the waits of this process's streams."""
        self._region.abort()
        self._flags.release()

    def retire(self) -> None:
        """After an abort: no step that is launched from now on waits here. The memory stays mapped until `close`."""
        self._flags.close()

    def close(self) -> None:
        """Waits for the device, then unmaps the region; the attention worker also frees its memory.

        If the device has failed, only the region is closed, and its error is raised.
        """
        try:
            with torch.cuda.device(self._device):
                torch.cuda.synchronize()
                self._flags.close()
                del self.qkv, self.attn_out, self._local_attn_out, self._local_qkv, self._region_qkv
                check(runtime.cudaHostUnregister(ctypes.addressof(self._host)))
                del self._host
                if self._is_owner:
                    check(runtime.cudaFree(self._device_pointer))
                else:
                    check(runtime.cudaIpcCloseMemHandle(self._device_pointer))
        finally:
            self._region.close()


def _make_flags(
    kind: str, device: torch.device, region: SharedRegion, header_pointer: int, flags_pointer: int
) -> CudaFlags:
    queued = StreamMemoryOperations(region, header_pointer)
    return FlagKernels(device, flags_pointer, header_pointer, queued) if kind == SPINNING else queued


def _copy_by_engine(target: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """Enqueues a copy on torch's current stream. Returns `target`."""
    stream, kind = torch.cuda.current_stream().cuda_stream, runtime.cudaMemcpyKind.cudaMemcpyDefault
    check(runtime.cudaMemcpyAsync(target.data_ptr(), source.data_ptr(), source.nbytes, kind, stream))
    return target


def _tensor_at(pointer: int, dtype: torch.dtype, shape: tuple[int, int], device: torch.device) -> torch.Tensor:
    """A tensor over memory that torch does not own. torch takes it for a tensor on `device`, even if the memory lies
    on a peer GPU: torch's public functions would use the memory's own device, and kernels on `device` would refuse it.
    """
    num_bytes = shape[0] * shape[1] * dtype.itemsize
    storage = torch._C._construct_storage_from_data_pointer(pointer, device, num_bytes)
    return torch.empty(0, dtype=dtype, device=device).set_(storage, 0, shape, (shape[1], 1))


def _attn_out_offset(spec: ChannelSpec) -> int:
    return align_up(spec.qkv_bytes, _ALIGNMENT)


def _flags_offset(spec: ChannelSpec) -> int:
    return _attn_out_offset(spec) + align_up(spec.attn_out_bytes, _ALIGNMENT)


def _data_bytes(spec: ChannelSpec) -> int:
    return _flags_offset(spec) + _NUM_FLAG_BYTES
