"""SiLU(gate) * up of the merged gate/up projection. Reference: `F.silu(gate) * up` (SwiGLU, arXiv:2002.05202)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from services.dense_worker.backends.triton_launch import KernelLauncher

_BLOCK_SIZE = 1024


def silu_mul(
    launcher: KernelLauncher,
    gate_up: torch.Tensor,  # [n, 2 * intermediate], rows contiguous: gate, then up
    out: torch.Tensor,  # [n, intermediate], rows contiguous; may be the gate half itself
) -> None:
    """Writes SiLU(gate) * up to `out`."""
    num_rows, size = out.shape
    launcher(
        _silu_mul_kernel,
        (triton.cdiv(size, _BLOCK_SIZE), num_rows),
        out,
        gate_up,
        size,
        out.stride(0),
        gate_up.stride(0),
        BLOCK_SIZE=_BLOCK_SIZE,
        num_warps=4,
    )


@triton.jit
def swiglu(gate, up, DTYPE: tl.constexpr):
    """SiLU(gate) * up in float32. Inputs and SiLU are rounded to DTYPE, as separate operators would round them."""
    gate = gate.to(DTYPE).to(tl.float32)
    silu = gate / (1.0 + tl.exp(-gate))
    return silu.to(DTYPE).to(tl.float32) * up.to(DTYPE).to(tl.float32)


@triton.jit
def _silu_mul_kernel(
    out, gate_up, size, out_stride, gate_up_stride, BLOCK_SIZE: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    row = tl.program_id(1).to(tl.int64)
    columns = tl.program_id(0) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    mask = columns < size
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    source = gate_up + row * gate_up_stride + columns
    gate = tl.load(source, mask=mask, other=0.0)
    up = tl.load(source + size, mask=mask, other=0.0)
    product = swiglu(gate.to(tl.float32), up.to(tl.float32), gate.dtype)
    tl.store(out + row * out_stride + columns, product.to(gate.dtype), mask=mask)
