"""RMSNorm kernels: one that also adds to the residual, and one for each q and k head.

References: `RmsNorm.normalize` and, if `is_plus_one`, `RmsNormPlusOne.normalize` in `model/norm.py`. They compute in
float32 and round where Hugging Face rounds.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from services.dense_worker.backends.triton_launch import KernelLauncher

_HEADS_PER_PROGRAM = 8


def add_rms_norm(
    launcher: KernelLauncher,
    residual: torch.Tensor,  # [n, hidden], rows contiguous; `delta` is added in place
    delta: torch.Tensor | None,  # [n, hidden]
    weight: torch.Tensor,  # [hidden]
    eps: float,
    out: torch.Tensor,  # [n, hidden]; may be `delta`
    *,
    is_plus_one: bool = False,  # the factor is 1 + weight
) -> None:
    """Computes residual += delta, then out = RMSNorm(residual) * weight (arXiv:1910.07467)."""
    num_rows, hidden_size = residual.shape
    block_size = triton.next_power_of_2(hidden_size)
    launcher(
        _add_rms_norm_kernel,
        (num_rows,),
        out,
        residual,
        delta,
        weight,
        hidden_size,
        eps,
        IS_PLUS_ONE=is_plus_one,
        BLOCK_SIZE=block_size,
        num_warps=min(max(block_size // 512, 1), 16),
    )


def head_rms_norm(
    launcher: KernelLauncher,
    qkv: torch.Tensor,  # [n, qkv_size]: q heads, k heads, v heads; q and k are normalised in place
    q_weight: torch.Tensor,  # [head_dim]
    k_weight: torch.Tensor,  # [head_dim]
    num_heads: int,
    num_kv_heads: int,
    eps: float,
    *,
    is_plus_one: bool = False,  # the factors are 1 + weight
) -> None:
    """Normalises each head of q and k by RMSNorm, in place."""
    head_dim = q_weight.shape[0]
    num_normed = num_heads + num_kv_heads
    launcher(
        _head_rms_norm_kernel,
        (qkv.shape[0], triton.cdiv(num_normed, _HEADS_PER_PROGRAM)),
        qkv,
        q_weight,
        k_weight,
        qkv.stride(0),
        eps,
        IS_PLUS_ONE=is_plus_one,
        NUM_HEADS=num_heads,
        NUM_NORMED=num_normed,
        HEAD_DIM=head_dim,
        BLOCK_DIM=triton.next_power_of_2(head_dim),
        BLOCK_HEADS=_HEADS_PER_PROGRAM,
        num_warps=4,
    )


@triton.jit
def normalize(x, weight, size, eps, AXIS: tl.constexpr):
    """RMSNorm of x (float32) over AXIS, in weight's dtype. x is padded with zeros beyond `size` elements."""
    mean_square = tl.sum(x * x, AXIS, keep_dims=True) / size
    return (x * tl.rsqrt(mean_square + eps)).to(weight.dtype) * weight


@triton.jit
def _normalize(x, weight, size, eps, AXIS: tl.constexpr, IS_PLUS_ONE: tl.constexpr):
    """`normalize`, or with the factor 1 + weight, rounded once."""
    if IS_PLUS_ONE:
        mean_square = tl.sum(x * x, AXIS, keep_dims=True) / size
        normed = (x * tl.rsqrt(mean_square + eps) * (weight.to(tl.float32) + 1.0)).to(weight.dtype)
    else:
        normed = normalize(x, weight, size, eps, AXIS)
    return normed


@triton.jit
def _add_rms_norm_kernel(
    out,
    residual,
    delta,
    weight,
    hidden_size,
    eps,
    IS_PLUS_ONE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PDL: tl.constexpr,
):
    row_start = tl.program_id(0).to(tl.int64) * hidden_size
    columns = tl.arange(0, BLOCK_SIZE)
    mask = columns < hidden_size
    gain = tl.load(weight + columns, mask=mask, other=0.0)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    x = tl.load(residual + row_start + columns, mask=mask, other=0.0)
    if delta is not None:
        change = tl.load(delta + row_start + columns, mask=mask, other=0.0)
        x = (x.to(tl.float32) + change.to(tl.float32)).to(x.dtype)
        tl.store(residual + row_start + columns, x, mask=mask)
    normed = _normalize(x.to(tl.float32), gain, hidden_size, eps, 0, IS_PLUS_ONE)
    tl.store(out + row_start + columns, normed, mask=mask)


@triton.jit
def _head_rms_norm_kernel(
    qkv,
    q_weight,
    k_weight,
    qkv_stride,
    eps,
    IS_PLUS_ONE: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    NUM_NORMED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    PDL: tl.constexpr,
):
    heads = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    dims = tl.arange(0, BLOCK_DIM)
    is_dim = dims < HEAD_DIM
    q_gain = tl.load(q_weight + dims, mask=is_dim, other=0.0)
    k_gain = tl.load(k_weight + dims, mask=is_dim, other=0.0)
    gain = tl.where((heads < NUM_HEADS)[:, None], q_gain[None, :], k_gain[None, :])
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    at = qkv + tl.program_id(0).to(tl.int64) * qkv_stride + heads[:, None] * HEAD_DIM + dims[None, :]
    mask = (heads < NUM_NORMED)[:, None] & is_dim[None, :]
    x = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    tl.store(at, _normalize(x, gain, HEAD_DIM, eps, 1, IS_PLUS_ONE), mask=mask)
