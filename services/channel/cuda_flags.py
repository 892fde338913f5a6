"""The two ways in which a stream sets a flag or waits for it. Both can be captured in a CUDA graph.

`FlagKernels` poll a flag in device memory from a kernel of one thread: the waiting stream goes on 1 to 2 µs after the
flag is set. `StreamMemoryOperations` let the GPU's front end wait. That takes 5 µs longer, but no kernel runs
meanwhile: matrix products have the whole GPU, and where processes take turns on the GPU (without MPS), a process does
not spend its turn polling.

A flag in device memory has a second word, which says that it is coming: all programs of the kernel before it run. Then
the kernel behind the wait is launched, and reads what does not depend on the flag. It takes no place on the GPU from
what it waits for, which has its own already.
"""

from __future__ import annotations

import ctypes
import threading
import time
from typing import Any, Protocol

import torch
from cuda.bindings import driver

from services.channel import Flag
from services.channel.region import ABORT_WORD, WORD_BYTES, SharedRegion, flag_word
from services.common.errors import DeviceError

FLAG_BYTES = 128  # device memory of each flag: a cache line of its own
POLLS_BEFORE_ABORT_CHECK = 64  # a power of two; the abort mark is in host memory and slow to read
_RELEASE_INTERVAL_S = 50e-6  # between two releases of the running step, which waits once per layer
_RELEASE_S = 2.0  # by then the running step has ended
_LATE_RELEASE_INTERVAL_S = 1e-3  # between two releases of steps that are launched later

# While a kernel runs on an SM, the division of its memory into first-level cache and shared memory stays as it is. So a
# waiting kernel that leaves no shared memory there would keep away the peer's kernels, which need much of it.
_CARVEOUT = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
_ALL_SHARED_MEMORY = 100  # percent

# A dependent launch starts a kernel before the previous kernel has ended; `griddepcontrol.wait` waits for that end.
_DEPENDENT_LAUNCH_CAPABILITY = (9, 0)
# The driver compiles this PTX for every later GPU too; PTX 8.0 itself only has names up to sm_90.
_PTX = """
.version 8.0
.target {target}
.address_size 64

.visible .entry set_flag(.param .u64 flag_address)
{{
    .reg .u64 %flag;
    ld.param.u64 %flag, [flag_address];
    {announce}
    {await_kernel_before}
    st.release.sys.global.u32 [%flag], 1;
    ret;
}}

.visible .entry set_queued_flag(.param .u64 flag_address)
{{
    .reg .u64 %flag;
    ld.param.u64 %flag, [flag_address];
    {await_kernel_before}
    st.release.sys.global.u32 [%flag], 1;
    ret;
}}

.visible .entry take_flag(.param .u64 flag_address, .param .u64 abort_address)
{{
    .reg .u64 %flag, %abort, %words;
    .reg .u32 %value, %coming, %polls, %remainder;
    .reg .pred %is_set, %is_coming, %goes_on;
    ld.param.u64 %flag, [flag_address];
    ld.param.u64 %abort, [abort_address];
    mov.u32 %polls, 0;
    {await_kernel_before}
poll:
    ld.acquire.sys.global.u64 %words, [%flag];
    mov.b64 {{%value, %coming}}, %words;
    setp.ne.u32 %is_set, %value, 0;
    @%is_set bra take;
    setp.ne.u32 %is_coming, %coming, 0;
    {start_kernel_after}
    add.u32 %polls, %polls, 1;
    and.b32 %remainder, %polls, {last_poll};
    setp.ne.u32 %goes_on, %remainder, 0;
    @%goes_on bra poll;
    ld.volatile.global.u32 %value, [%abort];
    setp.eq.u32 %goes_on, %value, 0;
    @%goes_on bra poll;
take:
    st.relaxed.sys.global.u64 [%flag], 0;
    ret;
}}
"""


class CudaFlags(Protocol):
    """Sets and takes the flags of one channel, in the order of the current stream."""

    def signal(self, flag: Flag) -> None:
        """Enqueues setting the flag. The peer sees it after the effects of all work enqueued before."""

    def wait(self, flag: Flag) -> None:
        """Enqueues a wait until the flag is set or the channel is aborted, then clears the flag."""

    def release(self) -> None:
        """Ends all waits of this process, also those of steps launched later. Call it after setting the abort mark."""

    def close(self) -> None:
        """Releases host resources. The device must be done with the flags."""


class StreamMemoryOperations:
    """Flags in host memory that both processes have registered with the driver: a CPU's store releases a wait."""

    def __init__(self, region: SharedRegion, header_pointer: int) -> None:
        self._region = region
        self._header_pointer = header_pointer
        self._is_closed = threading.Event()
        self._release: threading.Thread | None = None  # after an abort
        self._release_lock = threading.Lock()  # an abort may come from any thread, also during `close`

    def signal(self, flag: Flag) -> None:
        """Enqueues a stream memory write of 1."""
        check(driver.cuStreamWriteValue32(_current_stream(), self.address(flag), 1, 0))

    def wait(self, flag: Flag) -> None:
        """Enqueues a stream memory wait for 1 and a write of 0, as one operation, which is a node of a graph."""
        operations = [driver.CUstreamBatchMemOpParams() for _ in range(2)]
        wait, write = operations
        wait.operation = driver.CUstreamBatchMemOpType.CU_STREAM_MEM_OP_WAIT_VALUE_32
        wait.waitValue.address, wait.waitValue.value = self.address(flag), 1
        wait.waitValue.flags = int(driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_EQ)
        write.operation = driver.CUstreamBatchMemOpType.CU_STREAM_MEM_OP_WRITE_VALUE_32
        write.writeValue.address, write.writeValue.value = self.address(flag), 0
        check(driver.cuStreamBatchMemOp(_current_stream(), len(operations), operations, 0))

    def release(self) -> None:
        """Starts a thread that sets all flags again and again until `close`.

        Each process has its own thread, because the process that aborted first may have died since.
        """
        with self._release_lock:
            if self._release is None and not self._is_closed.is_set():
                self._release = threading.Thread(target=self._release_waits, name="release", daemon=True)
                self._release.start()

    def close(self) -> None:
        """Ends the releasing thread, if an abort has started it."""
        with self._release_lock:
            self._is_closed.set()
        if self._release is not None:
            self._release.join()

    def address(self, flag: Flag) -> int:
        return self._header_pointer + flag_word(flag) * WORD_BYTES

    def _release_waits(self) -> None:
        late = time.monotonic() + _RELEASE_S
        words = self._region.words
        while not self._is_closed.is_set():
            for flag in Flag:
                words[flag_word(flag)] = 1
            time.sleep(_RELEASE_INTERVAL_S if time.monotonic() < late else _LATE_RELEASE_INTERVAL_S)


class FlagKernels:
    """Flags in the memory of the attention worker's GPU. The abort mark in host memory ends every wait.

    LONG_STEP_QKV_READY, which takes long to come, is waited for by `queued`: it keeps no kernel running meanwhile.
    """

    def __init__(
        self, device: torch.device, flags_pointer: int, header_pointer: int, queued: StreamMemoryOperations
    ) -> None:
        """`device` is the GPU of this process and current. Raises `DeviceError` when the driver refuses the kernels."""
        self._queued = queued
        capability = torch.cuda.get_device_capability(device)
        overlaps = capability >= _DEPENDENT_LAUNCH_CAPABILITY
        ptx = _PTX.format(
            target="sm_90" if overlaps else "sm_70",
            last_poll=POLLS_BEFORE_ABORT_CHECK - 1,
            announce="st.relaxed.sys.global.u32 [%flag + 4], 1;" if overlaps else "",
            await_kernel_before="griddepcontrol.wait;" if overlaps else "",
            start_kernel_after="@%is_coming griddepcontrol.launch_dependents;" if overlaps else "",
        )
        image = ctypes.create_string_buffer(ptx.encode())
        module = check(driver.cuModuleLoadData(ctypes.addressof(image)))
        self._set = check(driver.cuModuleGetFunction(module, b"set_flag"))
        self._set_queued = check(driver.cuModuleGetFunction(module, b"set_queued_flag"))
        self._take = check(driver.cuModuleGetFunction(module, b"take_flag"))
        for kernel in (self._set, self._set_queued, self._take):
            check(driver.cuFuncSetAttribute(kernel, _CARVEOUT, _ALL_SHARED_MEMORY))
        self._abort_pointer = header_pointer + ABORT_WORD * WORD_BYTES
        self._flags_pointer = flags_pointer
        self._launch = driver.CUlaunchConfig()
        launch = self._launch
        launch.gridDimX = launch.gridDimY = launch.gridDimZ = 1
        launch.blockDimX = launch.blockDimY = launch.blockDimZ = 1
        if overlaps:
            attribute = driver.CUlaunchAttribute()
            attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            attribute.value.programmaticStreamSerializationAllowed = 1
            launch.attrs, launch.numAttrs = [attribute], 1

    def signal(self, flag: Flag) -> None:
        """Launches the kernel `set_flag`, or the one for a long step, which nobody polls."""
        if flag is Flag.LONG_STEP_QKV_READY:
            self._run(self._set_queued, self._queued.address(flag))
        else:
            self._run(self._set, self._address(flag))

    def wait(self, flag: Flag) -> None:
        """Launches the kernel `take_flag`, or queues the wait of a long step."""
        if flag is Flag.LONG_STEP_QKV_READY:
            self._queued.wait(flag)
        else:
            self._run(self._take, self._address(flag), self._abort_pointer)

    def release(self) -> None:
        """Releases the queued waits. Waiting kernels read the abort mark themselves."""
        self._queued.release()

    def close(self) -> None:
        """Closes the queued flags. The kernels stay loaded, because graphs that still exist refer to them."""
        self._queued.close()

    def _address(self, flag: Flag) -> int:
        return self._flags_pointer + flag * FLAG_BYTES

    def _run(self, kernel: Any, *addresses: int) -> None:
        self._launch.hStream = _current_stream()
        arguments = (addresses, (ctypes.c_void_p,) * len(addresses))
        check(driver.cuLaunchKernelEx(self._launch, kernel, arguments, 0))


def check(result: tuple[Any, ...]) -> Any:
    """The value of a CUDA call; raises `DeviceError` naming the error."""
    error, *values = result
    if int(error) != 0:
        raise DeviceError(f"a CUDA call failed: {error.name}")
    return values[0] if values else None


def _current_stream() -> int:
    return torch.cuda.current_stream().cuda_stream
