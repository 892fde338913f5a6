"""The linear layer of 2 to 64 tokens on the tensor cores. Its time is that of reading the weights.

The weights are the tall operand of the matrix product, so that few tokens waste no work. Layers with too few rows of
weights to occupy the GPU are also split along in_features. Of the programs of a tile, the one that ends last adds their
partial sums in a fixed order.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from services.dense_worker.kernels.linear.activation import MlpActivation
from services.dense_worker.kernels.linear.triton_activation import activated
from services.dense_worker.kernels.triton_launch import KernelLauncher

MIN_ROWS = 16  # narrowest tile; fewer tokens leave some of its columns empty
MAX_ROWS = 64
_BLOCK_OUT = 64
SPLIT_AREA = _BLOCK_OUT * MAX_ROWS  # sums of a program for which a `SplitWorkspace` has room
_MAX_SPLITS = 8


@dataclass(frozen=True, slots=True)
class SkinnyTiles:
    """Sizes of the kernel's loop; `num_stages` - 1 tiles of weights and tokens are in flight."""

    block_rows: int
    block_in: int
    num_stages: int
    num_splits: int


class SplitWorkspace:
    """Partial sums of split layers, in device memory. Counters are zero between launches.

    There is room for so many programs of `MAX_ROWS` rows, or accordingly more or fewer of others.
    """

    def __init__(self, device: torch.device, num_programs: int) -> None:
        self.partial_sums = torch.empty(num_programs * SPLIT_AREA, dtype=torch.float32, device=device)
        self.num_done = torch.zeros(num_programs * MAX_ROWS // MIN_ROWS, dtype=torch.int32, device=device)


def choose_skinny_tiles(num_rows: int, out_features: int, is_gated: bool, num_sms: int) -> SkinnyTiles:
    """The tiles with the fastest steps of 7B and 13B models on an H200, see bench/results/dense.md."""
    block_rows = max(MIN_ROWS, triton.next_power_of_2(num_rows))
    num_tiles = triton.cdiv(out_features, _BLOCK_OUT)
    if is_gated:
        if block_rows < MAX_ROWS and num_tiles < 1.5 * num_sms:
            return SkinnyTiles(block_rows, block_in=64, num_stages=4, num_splits=1)  # all tiles run at once
        return SkinnyTiles(block_rows, block_in=128, num_stages=4, num_splits=1)
    num_splits = 1
    while num_splits < _MAX_SPLITS and num_tiles * num_splits * 2 <= num_sms:
        num_splits *= 2
    return SkinnyTiles(block_rows, block_in=128, num_stages=6, num_splits=num_splits)


def skinny_linear(
    launcher: KernelLauncher,
    x: torch.Tensor,  # [n, in_features], n <= MAX_ROWS, 16 bits, rows contiguous
    weight: torch.Tensor,  # [out_features, in_features]; with a gated activation [2 * out_features, in_features]
    bias: torch.Tensor | None,  # [weight's rows]
    out: torch.Tensor,  # [n, out_features], x's dtype or float32; values are rounded to x's dtype in both cases
    workspace: SplitWorkspace,
    *,
    activation: MlpActivation | None = None,  # of the product
    residual: torch.Tensor | None = None,  # [n, out_features], strides of `out`: add it; may be `out`
) -> None:
    """Writes activation(x W^T + bias) to `out`. Then adds `residual`."""
    num_rows, out_features = out.shape
    in_features = x.shape[1]
    is_gated = activation is not None and activation.is_gated
    tiles = choose_skinny_tiles(num_rows, out_features, is_gated, launcher.num_sms)
    launcher(
        _skinny_kernel,
        (triton.cdiv(out_features, _BLOCK_OUT), tiles.num_splits),
        out,
        x,
        weight,
        bias,
        residual,
        workspace.partial_sums,
        workspace.num_done,
        num_rows,
        out_features,
        in_features,
        x.stride(0),
        out.stride(0),
        ACTIVATION=None if activation is None else activation.function.value,
        IS_GATED=is_gated,
        IS_PADDED=in_features % tiles.block_in != 0,
        BLOCK_ROWS=tiles.block_rows,
        BLOCK_OUT=_BLOCK_OUT,
        BLOCK_IN=tiles.block_in,
        NUM_SPLITS=tiles.num_splits,
        NUM_STAGES=tiles.num_stages,
        num_warps=4,
    )


@triton.jit(do_not_specialize=["num_rows"])
def _skinny_kernel(
    out,
    x,
    weight,
    bias,
    residual,
    partial_sums,
    num_done,
    num_rows,
    out_features,
    in_features,
    x_stride,
    out_stride,
    ACTIVATION: tl.constexpr,
    IS_GATED: tl.constexpr,
    IS_PADDED: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program computes BLOCK_OUT features of all tokens over one of NUM_SPLITS parts of in_features."""
    dtype: tl.constexpr = weight.dtype.element_ty
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    tile, split = tl.program_id(0), tl.program_id(1)
    features = tile * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    is_feature = features < out_features
    rows = tl.arange(0, BLOCK_ROWS)
    is_row = rows < num_rows
    # Features beyond the last read the first one's weights and are never stored, so weights need no mask.
    w_rows = weight + tl.where(is_feature, features, 0).to(tl.int64)[:, None] * in_features
    up_offset = out_features.to(tl.int64) * in_features
    x_rows = x + rows[:, None] * x_stride

    part_size = tl.cdiv(tl.cdiv(in_features, BLOCK_IN), NUM_SPLITS) * BLOCK_IN
    start = split * part_size
    end = tl.minimum(start + part_size, in_features)
    sums, up_sums = sum_products(
        w_rows, up_offset, x_rows, is_row, start, end, in_features,
        IS_GATED, IS_PADDED, BLOCK_ROWS, BLOCK_OUT, BLOCK_IN, NUM_STAGES,
    )  # fmt: skip

    is_last = True
    if NUM_SPLITS > 1:
        sums, is_last = add_splits(sums, partial_sums, num_done, tile, split, BLOCK_ROWS, BLOCK_OUT, NUM_SPLITS)
    if is_last:
        write_features(
            out, sums, up_sums, bias, residual, features, rows, is_row, out_features, out_stride,
            ACTIVATION, IS_GATED, dtype,
        )  # fmt: skip


@triton.jit
def sum_products(
    w_rows,  # [BLOCK_OUT, 1]: where rows of weights start
    up_offset,  # from there to the rows of the second half, if IS_GATED
    x_rows,  # [BLOCK_ROWS, 1]
    is_row,
    start,
    end,
    in_features,
    IS_GATED: tl.constexpr,
    IS_PADDED: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """Sums over the columns from start to end: float32 [BLOCK_OUT, BLOCK_ROWS], and those of the second half."""
    sums = tl.zeros([BLOCK_OUT, BLOCK_ROWS], tl.float32)
    up_sums = tl.zeros([BLOCK_OUT, BLOCK_ROWS], tl.float32)
    for first_column in tl.range(start, end, BLOCK_IN, num_stages=NUM_STAGES):
        columns = first_column + tl.arange(0, BLOCK_IN)
        is_column = columns < in_features if IS_PADDED else tl.full([BLOCK_IN], True, tl.int1)
        w = tl.load(w_rows + columns[None, :], mask=is_column[None, :], other=0.0)
        x_tile = tl.load(x_rows + columns[None, :], mask=is_row[:, None] & is_column[None, :], other=0.0)
        sums = tl.dot(w, tl.trans(x_tile), sums)
        if IS_GATED:
            w_up = tl.load(w_rows + up_offset + columns[None, :], mask=is_column[None, :], other=0.0)
            up_sums = tl.dot(w_up, tl.trans(x_tile), up_sums)
    return sums, up_sums


@triton.jit
def add_splits(
    sums,  # [BLOCK_OUT, BLOCK_ROWS]
    partial_sums,
    num_done,
    tile,
    split,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
):
    """Stores a program's sums; the tile's program that ends last gets the sums of all splits, and True."""
    part: tl.constexpr = BLOCK_ROWS * BLOCK_OUT
    at = tl.arange(0, BLOCK_ROWS)[None, :] * BLOCK_OUT + tl.arange(0, BLOCK_OUT)[:, None]
    at += partial_sums + tile * (NUM_SPLITS * part)
    tl.store(at + split * part, sums)
    tl.debug_barrier()  # all threads store before one of them counts
    is_last = tl.atomic_add(num_done + tile, 1, sem="acq_rel") == NUM_SPLITS - 1
    if is_last:
        sums = tl.zeros([BLOCK_OUT, BLOCK_ROWS], tl.float32)
        for i in tl.static_range(NUM_SPLITS):
            sums += tl.load(at + i * part)
        tl.store(num_done + tile, 0)
    return sums, is_last


@triton.jit
def write_features(
    out,
    y,  # float32 [BLOCK_OUT, BLOCK_ROWS]
    up,  # of that shape; read if IS_GATED
    bias,  # None: none
    residual,  # None: none
    features,
    rows,
    is_row,
    out_features,
    out_stride,
    ACTIVATION: tl.constexpr,  # None: none
    IS_GATED: tl.constexpr,
    DTYPE: tl.constexpr,  # to which each operation rounds
):
    """Adds the bias, computes the activation, adds the residual, and stores the features of all rows."""
    is_feature = features < out_features
    if bias is not None:
        y += tl.load(bias + features, mask=is_feature, other=0.0).to(tl.float32)[:, None]
    if IS_GATED and bias is not None:
        up += tl.load(bias + out_features + features, mask=is_feature, other=0.0).to(tl.float32)[:, None]
    y = activated(y, up, ACTIVATION, IS_GATED, DTYPE)
    target = rows.to(tl.int64)[None, :] * out_stride + features[:, None]
    mask = is_feature[:, None] & is_row[None, :]
    if residual is not None:
        y = y.to(DTYPE).to(tl.float32) + tl.load(residual + target, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + target, y.to(DTYPE).to(out.dtype.element_ty), mask=mask)
