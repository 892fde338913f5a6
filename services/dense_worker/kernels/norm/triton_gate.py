"""One kernel for what multiplies the output of attention, or of a recurrence, by a layer's gate.

Reference: `model.torch_operations.TorchOperations.apply_gate`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from services.dense_worker.kernels.norm.triton_norm import normalize
from services.dense_worker.kernels.triton_launch import KernelLauncher, begin

_ELEMENTS_PER_PROGRAM = 1024  # several heads


def apply_gate(
    launcher: KernelLauncher,
    x: torch.Tensor,  # [n, size], rows contiguous
    gate: torch.Tensor,  # [n, size], contiguous but for its rows
    weight: torch.Tensor | None,  # [head_dim], which divides size
    eps: float,
    out: torch.Tensor,  # [n, size], rows contiguous
) -> None:
    """out = x * sigmoid(gate); with a weight, out = RMSNorm of each head of x * weight * SiLU(gate)."""
    num_rows, size = x.shape
    head_dim = _ELEMENTS_PER_PROGRAM if weight is None else len(weight)
    block_dim = triton.next_power_of_2(head_dim)
    block_heads = max(_ELEMENTS_PER_PROGRAM // block_dim, 1)
    launcher(
        _apply_gate_kernel,
        (num_rows, triton.cdiv(size, block_heads * head_dim)),
        out,
        x,
        gate,
        weight,
        gate.stride(0),
        size,
        eps,
        HEAD_DIM=head_dim,
        BLOCK_DIM=block_dim,
        BLOCK_HEADS=block_heads,
        num_warps=4,
    )


@triton.jit
def _apply_gate_kernel(
    out,
    x,
    gate,
    weight,
    gate_stride,
    size,
    eps,
    HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program computes BLOCK_HEADS heads of a row; without a weight, HEAD_DIM elements are a head."""
    row = tl.program_id(0).to(tl.int64)
    dims = tl.arange(0, BLOCK_DIM)
    is_dim = dims < HEAD_DIM
    places = (tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS))[:, None] * HEAD_DIM + dims[None, :]
    mask = is_dim[None, :] & (places < size)
    if weight is not None:
        gain = tl.load(weight + dims, mask=is_dim, other=0.0)
    begin(PDL)
    values = tl.load(x + row * size + places, mask=mask, other=0.0)
    gates = tl.load(gate + row * gate_stride + places, mask=mask, other=0.0).to(tl.float32)
    shares = 1.0 / (1.0 + tl.exp(-gates))
    if weight is not None:
        normed = normalize(values.to(tl.float32), gain[None, :], HEAD_DIM, eps, 1)
        product = normed.to(tl.float32) * (gates * shares)
    else:
        product = values.to(tl.float32) * shares.to(values.dtype).to(tl.float32)
    tl.store(out + row * size + places, product.to(values.dtype), mask=mask)
