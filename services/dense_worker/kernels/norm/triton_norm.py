"""Norm kernels: one that also adds to the residual, and one for the heads of q, k and v.

References: the norms' `normalize` in `norm.py`. The kernels compute in float32 and round where Hugging Face does.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from services.dense_worker.kernels.norm.norm import HeadNorms, LayerNorm, Norm, RmsNorm, RmsNormPlusOne
from services.dense_worker.kernels.triton_launch import KernelLauncher, begin

_HEADS_PER_PROGRAM = 8
_HEAD_ELEMENTS_PER_PROGRAM = 4096
_MOST_SINGLE_ROWS = 64  # beyond, a program of `normalize_heads` has two, in the same order of sums
_KINDS = {RmsNorm: "rms", RmsNormPlusOne: "rms_plus_one", LayerNorm: "layer"}  # of `normalize_as`


class NormOperands(NamedTuple):
    """What a kernel takes of a norm."""

    kind: str | None  # None: there is no norm
    weight: torch.Tensor | None
    bias: torch.Tensor | None
    eps: float


def operands_of(norm: Norm | None) -> NormOperands:
    """The operands of any norm that has a weight."""
    if norm is None:
        return NormOperands(None, None, None, 0.0)
    bias = norm.bias if isinstance(norm, LayerNorm) else None
    return NormOperands(_KINDS[type(norm)], norm.weight.data, None if bias is None else bias.data, norm.eps)


def add_norm(
    launcher: KernelLauncher,
    residual: torch.Tensor,  # [n, hidden], columns contiguous; `delta` is added in place
    delta: torch.Tensor | None,  # [n, hidden], rows contiguous
    norm: Norm | None,
    out: torch.Tensor | None,  # [n, hidden], columns contiguous; may be `delta`, or `residual` without a delta
    *,
    delta_norm: Norm | None = None,
    multiplier: float = 1.0,
) -> None:
    """Computes residual += multiplier * delta_norm(delta), then out = norm(residual)."""
    num_rows, hidden_size = residual.shape
    block_size = triton.next_power_of_2(hidden_size)
    of_norm, of_delta = operands_of(norm), operands_of(delta_norm)
    launcher(
        _add_norm_kernel,
        (num_rows,),
        out,
        residual,
        delta,
        of_norm.weight,
        of_norm.bias,
        of_delta.weight,
        of_delta.bias,
        hidden_size,
        0 if out is None else out.stride(0),
        residual.stride(0),
        of_norm.eps,
        of_delta.eps,
        multiplier,
        NORM=of_norm.kind,
        DELTA_NORM=of_delta.kind,
        HAS_MULTIPLIER=multiplier != 1.0,
        BLOCK_SIZE=block_size,
        num_warps=min(max(block_size // 512, 1), 16),
    )


def normalize_heads(
    launcher: KernelLauncher,
    qkv: torch.Tensor,  # [n, qkv_size]: q heads, k heads, v heads; written in place
    norms: HeadNorms,
) -> None:
    """Normalises each head of q and k, and of v if it has a norm, in place."""
    q, k = operands_of(norms.q), operands_of(norms.k)
    assert k.kind in (None, q.kind) and q.bias is None and k.bias is None, "q and k have the same norm, without a bias"
    head_dim = q.weight.shape[-1]
    num_kv_heads = 0 if norms.k is None else norms.num_kv_heads
    num_normed = norms.num_heads + num_kv_heads * (1 if norms.v is None else 2)
    block_dim = triton.next_power_of_2(head_dim)
    block_heads = max(min(_HEADS_PER_PROGRAM, _HEAD_ELEMENTS_PER_PROGRAM // block_dim), 1)
    block_rows = 1 if len(qkv) <= _MOST_SINGLE_ROWS else 2
    launcher(
        _normalize_heads_kernel,
        (triton.cdiv(len(qkv), block_rows), triton.cdiv(num_normed, block_heads)),
        qkv,
        q.weight,
        k.weight,
        len(qkv),
        qkv.stride(0),
        q.eps,
        NORM=q.kind,
        HAVE_OWN_WEIGHTS=q.weight.dim() == 2,
        NUM_HEADS=norms.num_heads,
        NUM_KV_HEADS=num_kv_heads,
        NUM_NORMED=num_normed,
        HEAD_DIM=head_dim,
        BLOCK_DIM=block_dim,
        BLOCK_HEADS=block_heads,
        BLOCK_ROWS=block_rows,
        num_warps=4 * block_rows,
    )


@triton.jit
def normalize(x, weight, size, eps, AXIS: tl.constexpr):
    """RMSNorm of x (float32) over AXIS, in weight's dtype. x is padded with zeros beyond `size` elements."""
    mean_square = tl.sum(x * x, AXIS, keep_dims=True) / size
    return (x * tl.rsqrt(mean_square + eps)).to(weight.dtype) * weight


@triton.jit
def normalize_as(x, is_element, weight, bias, size, eps, AXIS: tl.constexpr, NORM: tl.constexpr):
    """The norm of x (float32) that NORM names, in weight's dtype. Beyond `size` elements, x and `is_element` are 0."""
    if NORM == "rms":
        normed = normalize(x, weight, size, eps, AXIS)
    elif NORM == "rms_plus_one":  # rounded once
        mean_square = tl.sum(x * x, AXIS, keep_dims=True) / size
        normed = (x * tl.rsqrt(mean_square + eps) * (weight.to(tl.float32) + 1.0)).to(weight.dtype)
    else:  # arXiv:1607.06450, rounded once
        tl.static_assert(NORM == "layer")
        centred = tl.where(is_element, x - tl.sum(x, AXIS, keep_dims=True) / size, 0.0)
        variance = tl.sum(centred * centred, AXIS, keep_dims=True) / size
        scaled = centred * tl.rsqrt(variance + eps) * weight.to(tl.float32)
        if bias is not None:
            scaled += bias.to(tl.float32)
        normed = scaled.to(weight.dtype)
    return normed


@triton.jit
def _add_norm_kernel(
    out,
    residual,
    delta,
    weight,
    bias,
    delta_weight,
    delta_bias,
    hidden_size,
    out_stride,
    residual_stride,
    eps,
    delta_eps,
    multiplier,
    NORM: tl.constexpr,
    DELTA_NORM: tl.constexpr,
    HAS_MULTIPLIER: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program computes a row."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK_SIZE)
    mask = columns < hidden_size
    gain, shift, delta_gain, delta_shift = None, None, None, None
    if weight is not None:
        gain = tl.load(weight + columns, mask=mask, other=0.0)
    if bias is not None:
        shift = tl.load(bias + columns, mask=mask, other=0.0)
    if delta_weight is not None:
        delta_gain = tl.load(delta_weight + columns, mask=mask, other=0.0)
    if delta_bias is not None:
        delta_shift = tl.load(delta_bias + columns, mask=mask, other=0.0)
    begin(PDL)
    x = tl.load(residual + row * residual_stride + columns, mask=mask, other=0.0)
    if delta is not None:
        change = tl.load(delta + row * hidden_size + columns, mask=mask, other=0.0).to(tl.float32)
        if DELTA_NORM is not None:
            change = normalize_as(change, mask, delta_gain, delta_shift, hidden_size, delta_eps, 0, DELTA_NORM)
            change = change.to(tl.float32)
        if HAS_MULTIPLIER:
            change = (change * multiplier).to(x.dtype).to(tl.float32)
        x = (x.to(tl.float32) + change).to(x.dtype)
        tl.store(residual + row * residual_stride + columns, x, mask=mask)
    if NORM is not None:
        normed = normalize_as(x.to(tl.float32), mask, gain, shift, hidden_size, eps, 0, NORM)
        tl.store(out + row * out_stride + columns, normed, mask=mask)


@triton.jit(do_not_specialize=["num_rows"])
def _normalize_heads_kernel(
    qkv,
    q_weight,
    k_weight,
    num_rows,
    qkv_stride,
    eps,
    NORM: tl.constexpr,
    HAVE_OWN_WEIGHTS: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    NUM_NORMED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program normalises BLOCK_HEADS heads of each of its rows. If not only q and k are normalised, v heads follow.
    """
    places = tl.arange(0, BLOCK_ROWS * BLOCK_HEADS)
    rows = tl.program_id(0) * BLOCK_ROWS + places // BLOCK_HEADS
    heads = tl.program_id(1) * BLOCK_HEADS + places % BLOCK_HEADS
    dims = tl.arange(0, BLOCK_DIM)
    is_dim = dims < HEAD_DIM
    is_q, is_k = heads < NUM_HEADS, (heads >= NUM_HEADS) & (heads < NUM_HEADS + NUM_KV_HEADS)
    if HAVE_OWN_WEIGHTS:
        weights = heads[:, None] * HEAD_DIM + dims[None, :]
        gain = tl.load(q_weight + weights, mask=is_q[:, None] & is_dim[None, :], other=0.0)
    else:
        gain = tl.load(q_weight + dims, mask=is_dim, other=0.0)[None, :]
    if k_weight is not None:
        if HAVE_OWN_WEIGHTS:
            k_gain = tl.load(k_weight + weights - NUM_HEADS * HEAD_DIM, mask=is_k[:, None] & is_dim[None, :], other=0.0)
        else:
            k_gain = tl.load(k_weight + dims, mask=is_dim, other=0.0)[None, :]
        gain = tl.where(is_q[:, None], gain, k_gain)
    if NUM_NORMED > NUM_HEADS + NUM_KV_HEADS:  # v heads have no weight
        gain = tl.where((is_q | is_k)[:, None], gain, 0.0 if NORM == "rms_plus_one" else 1.0)
    begin(PDL)
    at = qkv + rows.to(tl.int64)[:, None] * qkv_stride + heads[:, None] * HEAD_DIM + dims[None, :]
    mask = ((rows < num_rows) & (heads < NUM_NORMED))[:, None] & is_dim[None, :]
    x = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    tl.store(at, normalize_as(x, is_dim[None, :], gain, None, HEAD_DIM, eps, 1, NORM), mask=mask)
