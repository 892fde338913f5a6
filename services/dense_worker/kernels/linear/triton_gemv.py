"""The linear layer of one token: y = W x, with norm, activation or addition fused. Its time is that of reading W.

A program keeps x in registers and streams some rows of W through shared memory. With programmatic dependent launch it
loads the first rows while the previous kernel still computes x.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from services.dense_worker.kernels.linear.activation import MlpActivation
from services.dense_worker.kernels.linear.triton_activation import activated
from services.dense_worker.kernels.norm.norm import Norm
from services.dense_worker.kernels.norm.triton_norm import normalize_as, operands_of
from services.dense_worker.kernels.triton_launch import KernelLauncher

_MAX_BLOCK_OUT = 16


@dataclass(frozen=True, slots=True)
class GemvTiles:
    """Sizes of the kernel's loop: tiles of `block_out` rows of W, of which `num_stages` - 1 are in flight."""

    block_in: int  # in_features, padded to a power of two
    block_out: int
    num_stages: int
    num_warps: int
    programs_per_sm: int  # programs that run at the same time on an SM


def choose_gemv_tiles(in_features: int, is_gated: bool) -> GemvTiles:
    """The tiles with the fastest steps of 7B and 13B models on an H200, see bench/results/dense.md.

    The programs of an SM together hold 128 to 192 KiB of W, padding included.
    """
    block_in = triton.next_power_of_2(in_features)
    if is_gated:  # each program has two tiles: gate rows and up rows
        if block_in <= 4096:
            elements, num_stages, num_warps, programs_per_sm = 16384, 3, 8, 1
        elif block_in <= 8192:
            elements, num_stages, num_warps, programs_per_sm = 8192, 4, 8, 2
        else:
            elements, num_stages, num_warps, programs_per_sm = block_in, 3 if block_in <= 16384 else 2, 16, 1
    elif block_in <= 8192:
        elements, num_stages, num_warps, programs_per_sm = 16384, 3, 8, 3
    elif block_in <= 16384:
        elements, num_stages, num_warps, programs_per_sm = 16384, 4, 8, 2
    else:
        elements, num_stages, num_warps, programs_per_sm = block_in, 3, 16, 1
    block_out = min(elements // block_in, _MAX_BLOCK_OUT)
    return GemvTiles(block_in, block_out, num_stages, num_warps, programs_per_sm)


def gemv(
    launcher: KernelLauncher,
    x: torch.Tensor,  # [1, in_features], 16 bits
    weight: torch.Tensor,  # [out_features, in_features]; with a gated activation [2 * out_features, in_features]
    bias: torch.Tensor | None,  # [weight's rows]
    out: torch.Tensor,  # [1, out_features], x's dtype or float32; values are rounded to x's dtype in both cases
    *,
    norm: Norm | None = None,  # of x, before the product
    activation: MlpActivation | None = None,  # of the product
    residual: torch.Tensor | None = None,  # [1, out_features]: add it to the result; may be `out`
) -> None:
    """Writes activation(W norm(x) + bias) to `out`. Then adds `residual`."""
    out_features, in_features = out.shape[1], x.shape[1]
    is_gated = activation is not None and activation.is_gated
    of_norm = operands_of(norm)
    tiles = choose_gemv_tiles(in_features, is_gated)
    rows_per_program = triton.cdiv(out_features, launcher.num_sms * tiles.programs_per_sm)
    launcher(
        _gemv_kernel,
        (triton.cdiv(out_features, rows_per_program),),
        out,
        x,
        weight,
        of_norm.weight,
        of_norm.bias,
        bias,
        residual,
        out_features,
        in_features,
        rows_per_program,
        of_norm.eps,
        NORM=of_norm.kind,
        ACTIVATION=None if activation is None else activation.function.value,
        IS_GATED=is_gated,
        IS_PADDED=in_features < tiles.block_in,
        BLOCK_IN=tiles.block_in,
        BLOCK_OUT=tiles.block_out,
        NUM_STAGES=tiles.num_stages,
        num_warps=tiles.num_warps,
    )


@triton.jit(do_not_specialize=["rows_per_program"])
def _gemv_kernel(
    out,
    x,
    weight,
    norm_weight,
    norm_bias,
    bias,
    residual,
    out_features,
    in_features,
    rows_per_program,
    eps,
    NORM: tl.constexpr,
    ACTIVATION: tl.constexpr,
    IS_GATED: tl.constexpr,
    IS_PADDED: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    dtype: tl.constexpr = weight.dtype.element_ty
    start = tl.program_id(0) * rows_per_program
    end = tl.minimum(start + rows_per_program, out_features)
    if PDL:
        gdc_launch_dependents()
    columns = tl.arange(0, BLOCK_IN)
    is_column = columns < in_features if IS_PADDED else tl.full([BLOCK_IN], True, tl.int1)
    if norm_weight is not None:
        gain = tl.load(norm_weight + columns, mask=is_column, other=0.0)
        shift = None
        if norm_bias is not None:
            shift = tl.load(norm_bias + columns, mask=is_column, other=0.0)
    up_offset = out_features.to(tl.int64) * in_features
    x_row = tl.zeros([BLOCK_IN], tl.float32)
    for first_row in tl.range(start, end, BLOCK_OUT, num_stages=NUM_STAGES):
        rows = first_row + tl.arange(0, BLOCK_OUT)
        is_row = rows < end
        tile = weight + rows.to(tl.int64)[:, None] * in_features + columns[None, :]
        mask = is_row[:, None] & is_column[None, :]
        w = tl.load(tile, mask=mask, other=0.0)
        if IS_GATED:
            w_up = tl.load(tile + up_offset, mask=mask, other=0.0)
        # The wait is in the loop, so that the loads of W above come before it: the compiler moves them ahead by
        # NUM_STAGES - 1 iterations.
        if first_row == start:
            if PDL:
                gdc_wait()
            x_row = tl.load(x + columns, mask=is_column, other=0.0).to(tl.float32)
            if norm_weight is not None:
                x_row = normalize_as(x_row, is_column, gain, shift, in_features, eps, 0, NORM).to(tl.float32)
        y = tl.sum(w.to(tl.float32) * x_row[None, :], 1)
        if bias is not None:
            y += tl.load(bias + rows, mask=is_row, other=0.0).to(tl.float32)
        up = y
        if IS_GATED:
            up = tl.sum(w_up.to(tl.float32) * x_row[None, :], 1)
            if bias is not None:
                up += tl.load(bias + out_features + rows, mask=is_row, other=0.0).to(tl.float32)
        y = activated(y, up, ACTIVATION, IS_GATED, dtype)
        if residual is not None:
            y = y.to(dtype).to(tl.float32) + tl.load(residual + rows, mask=is_row, other=0.0).to(tl.float32)
        tl.store(out + rows, y.to(dtype).to(out.dtype.element_ty), mask=is_row)
