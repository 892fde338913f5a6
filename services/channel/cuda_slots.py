"""`SlotFlags`: kernels that set, or wait for, the flags of several channels at once, as a table in device memory says.

One dense worker meets up to `NUM_SLOTS` attention workers. A channel has a slot, and a step says how many rows each
has; one without rows is passed by. So a captured graph serves whatever workers there are, however rows are dealt.

Flags are those of `cuda_flags`, but for their second word: that a flag is coming is neither read nor cleared here.
"""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

import torch
from cuda.bindings import driver

from services.channel.cuda_flags import POLLS_BEFORE_ABORT_CHECK, check
from services.common.batch_buckets import SHORT_STEP_TOKENS

NUM_SLOTS = 32  # a warp: each thread handles the flag of one; the limit `MAX_ATTENTION_WORKERS`


class SlotAddresses(NamedTuple):
    """Device addresses of one channel: a row of the table, 64-bit words in this order."""

    qkv: int
    attn_out: int
    qkv_ready: int
    long_qkv_ready: int
    attention_ready: int
    abort: int


WORDS_PER_SLOT = len(SlotAddresses._fields)
QKV, ATTN_OUT = 0, 1  # columns

# The start of both kernels: a thread ends if its slot has no rows; otherwise the slot's row of the table is %address.
_FIND_SLOT = """{await_kernel_before}
    mov.u32 %slot, %tid.x;
    ld.param.u64 %address, [counts];
    mul.wide.u32 %offset, %slot, 4;
    add.u64 %address, %address, %offset;
    ld.volatile.global.u32 %count, [%address];
    setp.eq.u32 %is, %count, 0;
    @%is bra done;
    ld.param.u64 %address, [table];
    mul.wide.u32 %offset, %slot, {slot_bytes};
    add.u64 %address, %address, %offset;"""

_PTX = """
.version 8.0
.target {target}
.address_size 64

.visible .entry set_flags(.param .u64 table, .param .u64 counts)
{{
    .reg .u32 %slot, %count;
    .reg .u64 %address, %offset, %flag;
    .reg .pred %is;
    {find_slot}
    ld.volatile.global.u64 %flag, [%address + {qkv_ready}];
    setp.le.u32 %is, %count, {short_step};
    @%is bra set;
    ld.volatile.global.u64 %flag, [%address + {long_qkv_ready}];
set:
    st.release.sys.global.u32 [%flag], 1;
done:
    ret;
}}

.visible .entry take_flags(.param .u64 table, .param .u64 counts)
{{
    .reg .u32 %slot, %count, %value, %polls, %remainder;
    .reg .u64 %address, %offset, %flag, %abort;
    .reg .pred %is;
    {find_slot}
    ld.volatile.global.u64 %flag, [%address + {attention_ready}];
    ld.volatile.global.u64 %abort, [%address + {abort}];
    mov.u32 %polls, 0;
poll:
    ld.acquire.sys.global.u32 %value, [%flag];
    setp.ne.u32 %is, %value, 0;
    @%is bra take;
    add.u32 %polls, %polls, 1;
    and.b32 %remainder, %polls, {last_poll};
    setp.ne.u32 %is, %remainder, 0;
    @%is bra poll;
    ld.volatile.global.u32 %value, [%abort];
    setp.eq.u32 %is, %value, 0;
    @%is bra poll;
take:
    st.relaxed.sys.global.u32 [%flag], 0;
done:
    ret;
}}
"""


def make_ptx(capability: tuple[int, int]) -> str:
    """The kernels for GPUs of this compute capability."""
    overlaps = capability >= (9, 0)
    words = {name: index * 8 for index, name in enumerate(SlotAddresses._fields)}
    await_kernel_before = "griddepcontrol.wait;" if overlaps else ""
    return _PTX.format(
        target="sm_90" if overlaps else "sm_70",
        last_poll=POLLS_BEFORE_ABORT_CHECK - 1,
        find_slot=_FIND_SLOT.format(await_kernel_before=await_kernel_before, slot_bytes=WORDS_PER_SLOT * 8),
        short_step=SHORT_STEP_TOKENS,
        **words,
    )


class SlotFlags:
    """Kernels of one warp, in the order of the current stream; they may be captured."""

    def __init__(self, device: torch.device, table: torch.Tensor, counts: torch.Tensor) -> None:
        """`table`: int64 [NUM_SLOTS, WORDS_PER_SLOT], `counts`: int32 [NUM_SLOTS], the rows of each slot in a step."""
        capability = torch.cuda.get_device_capability(device)
        image = ctypes.create_string_buffer(make_ptx(capability).encode())
        module = check(driver.cuModuleLoadData(ctypes.addressof(image)))
        self._set = check(driver.cuModuleGetFunction(module, b"set_flags"))
        self._take = check(driver.cuModuleGetFunction(module, b"take_flags"))
        carveout = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
        for kernel in (self._set, self._take):  # see `cuda_flags`: the peers' kernels need the shared memory
            check(driver.cuFuncSetAttribute(kernel, carveout, 100))
        self._arguments = ((table.data_ptr(), counts.data_ptr()), (ctypes.c_void_p,) * 2)
        self._launch = driver.CUlaunchConfig()
        launch = self._launch
        launch.gridDimX = launch.gridDimY = launch.gridDimZ = 1
        launch.blockDimX, launch.blockDimY, launch.blockDimZ = NUM_SLOTS, 1, 1

    def signal(self) -> None:
        """Enqueues setting the flag of each slot with rows: that of a short or of a long step, by their number."""
        self._run(self._set)

    def wait(self) -> None:
        """Enqueues a wait for the output of each slot with rows, or for its abort mark; clears the flags."""
        self._run(self._take)

    def _run(self, kernel: Any) -> None:
        self._launch.hStream = torch.cuda.current_stream().cuda_stream
        check(driver.cuLaunchKernelEx(self._launch, kernel, self._arguments, 0))
