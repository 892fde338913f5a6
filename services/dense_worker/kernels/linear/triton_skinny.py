"""The linear layer of 2 to 64 tokens on the tensor cores. Its time is that of reading the weights.

The weights are the tall operand of the matrix product, so that few tokens waste no work. Layers with too few rows of
weights to occupy the GPU are also split along in_features. Of the programs of a tile, the one that ends last adds their
partial sums in a fixed order.

Weights and rows have 16 bits, or are both codes of FP8 or INT8, which the tensor cores multiply as such: INT8 exactly.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from services.dense_worker.kernels.linear.activation import MlpActivation
from services.dense_worker.kernels.linear.quantized.operands import CodeScales
from services.dense_worker.kernels.linear.quantized.triton_codes import TRITON_TYPES
from services.dense_worker.kernels.linear.triton_skinny_hopper import can_copy_ahead, multiply_copied_ahead
from services.dense_worker.kernels.linear.triton_tiles import (
    BLOCK_OUT,
    MAX_ROWS,
    MIN_ROWS,
    SplitWorkspace,
    add_splits,
    part_of_split,
    sum_products,
    write_features,
)
from services.dense_worker.kernels.norm.norm import SplitNorm, num_squares
from services.dense_worker.kernels.norm.triton_split_norm import (
    norm_factors,
    operands_of_halves,
    read_squares,
    write_for_norm,
)
from services.dense_worker.kernels.triton_launch import KernelLauncher, begin

_MAX_SPLITS = 8
_TILES_PER_SM = 2  # that run at once
SM_BYTES = 224 << 10  # of a Hopper's shared memory, less what barriers and the system need


@dataclass(frozen=True, slots=True)
class SkinnyTiles:
    """Sizes of the kernel's loop; `num_stages` - 1 tiles of weights and tokens are in flight."""

    block_rows: int
    block_in: int
    num_stages: int
    num_splits: int
    height: int = BLOCK_OUT  # features of a program; the rest of BLOCK_OUT, as the tensor cores need it, is zeros


def choose_skinny_tiles(
    num_rows: int,
    out_features: int,
    is_gated: bool,
    num_sms: int,
    itemsize: int = 2,
    *,
    is_ahead: bool = False,
    most_tiles: int | None = None,
) -> SkinnyTiles:
    """The tiles with the fastest steps of 7B and 13B models on an H200, see bench/results/dense.md.

    Those of FP8 have as many bytes. `is_ahead`: those of `triton_skinny_hopper`, whose programs fill the shared memory
    of an SM with tiles in flight. `most_tiles`: of all programs together; None: any number.
    """
    block_rows = max(MIN_ROWS, triton.next_power_of_2(num_rows))
    num_tiles = triton.cdiv(out_features, BLOCK_OUT)
    if is_ahead:
        num_splits = _num_splits(num_tiles, num_sms, is_gated)
        height = BLOCK_OUT
        if num_splits == 1 and (itemsize > 1 or block_rows < MAX_ROWS):  # more programs read many codes' rows again
            height = _balanced_height(out_features, num_sms, most_tiles or num_tiles * 2)
            num_tiles = triton.cdiv(out_features, height)
        programs_per_sm = 1 if num_tiles * num_splits <= num_sms else 2  # all tiles run at once
        is_narrow = is_gated and programs_per_sm == 2 and block_rows > MIN_ROWS  # else two stages are in flight
        row_bytes = 128 if is_narrow and (height < BLOCK_OUT or num_tiles < 1.5 * num_sms) else 256
        tile_bytes = row_bytes * (BLOCK_OUT * (1 + is_gated) + block_rows)
        num_stages = SM_BYTES // programs_per_sm // tile_bytes
        return SkinnyTiles(block_rows, row_bytes // itemsize, num_stages, num_splits, height)
    if is_gated:
        if block_rows < MAX_ROWS and num_tiles < 1.5 * num_sms:
            return SkinnyTiles(block_rows, 128 // itemsize, num_stages=4, num_splits=1)  # all tiles run at once
        return SkinnyTiles(block_rows, 256 // itemsize, num_stages=4, num_splits=1)
    return SkinnyTiles(block_rows, 256 // itemsize, num_stages=6, num_splits=_num_splits(num_tiles, num_sms, is_gated))


def _balanced_height(out_features: int, num_sms: int, most_tiles: int) -> int:
    """A part of out_features with which the SMs that read most of the weights read least, if all tiles run at once."""
    heights = [
        height
        for height in range(BLOCK_OUT, BLOCK_OUT // 2, -1)
        if out_features % height == 0 and out_features // height <= min(_TILES_PER_SM * num_sms, most_tiles)
    ]
    return min(heights, key=lambda height: triton.cdiv(out_features // height, num_sms) * height, default=BLOCK_OUT)


def _num_splits(num_tiles: int, num_sms: int, is_gated: bool) -> int:
    """Into how many parts in_features are split; activations are of whole sums."""
    num_splits = 1
    while not is_gated and num_splits < _MAX_SPLITS and num_tiles * num_splits * 2 <= num_sms:
        num_splits *= 2
    return num_splits


def skinny_linear(
    launcher: KernelLauncher,
    x: torch.Tensor,  # [n, in_features], n <= MAX_ROWS, rows contiguous: 16 bits, or codes of e4m3 or int8
    weight: torch.Tensor,  # x's dtype [out_features, in_features]; with a gated activation [2 * out_features, ...]
    bias: torch.Tensor | None,  # [weight's rows]
    out: torch.Tensor,  # [n, out_features], the model's dtype or float32; values are rounded to the former
    workspace: SplitWorkspace,
    *,
    scales: CodeScales | None = None,  # of codes
    activation: MlpActivation | None = None,  # of the product
    residual: torch.Tensor | None = None,  # [n, out_features], strides of `out`: add it; may be `out`
    norm: SplitNorm | None = None,  # before the product, which computes its second half; x: its rows
    norm_after: SplitNorm | None = None,  # of `out`: its first half
) -> None:
    """Writes activation(x W^T + bias) to `out`. Then adds `residual`."""
    num_rows, out_features = out.shape
    in_features = x.shape[1]
    is_gated = activation is not None and activation.is_gated
    is_ahead = can_copy_ahead(launcher, x, weight)
    most_tiles = None if norm_after is None else num_squares(out_features)
    options = {"is_ahead": is_ahead, "most_tiles": most_tiles}
    tiles = choose_skinny_tiles(num_rows, out_features, is_gated, launcher.num_sms, x.itemsize, **options)
    constants = {
        "DTYPE": TRITON_TYPES[x.dtype if scales is None else scales.dtype],
        "ACTIVATION": None if activation is None else activation.function.value,
        "IS_GATED": is_gated,
        "BLOCK_ROWS": tiles.block_rows,
        "BLOCK_OUT": BLOCK_OUT,
        "BLOCK_IN": tiles.block_in,
        "NUM_SPLITS": tiles.num_splits,
        "NUM_STAGES": tiles.num_stages,
        "num_warps": 4,
    }
    if is_ahead:
        norms = norm, norm_after
        constants["HEIGHT"] = tiles.height
        multiply_copied_ahead(launcher, x, weight, bias, out, workspace, scales, residual, *norms, **constants)
        return
    if norm_after is not None and launcher.is_hopper:  # products of other alignment have lower tiles, and so more
        norm_after.squares.zero_()
    launcher(
        _skinny_kernel,
        (triton.cdiv(out_features, BLOCK_OUT), tiles.num_splits),
        out,
        x,
        weight,
        None if scales is None else scales.rows,
        None if scales is None else scales.weights,
        bias,
        residual,
        *operands_of_halves(norm, norm_after),
        workspace.partial_sums,
        workspace.num_done,
        num_rows,
        out_features,
        in_features,
        x.stride(0),
        out.stride(0),
        IS_PADDED=in_features % tiles.block_in != 0,
        **constants,
    )


@triton.jit(do_not_specialize=["num_rows"])
def _skinny_kernel(
    out,
    x,
    weight,
    x_scale,
    weight_scale,
    bias,
    residual,
    squares_before,
    eps,
    weight_after,
    weighted,
    squares_after,
    partial_sums,
    num_done,
    num_rows,
    out_features,
    in_features,
    x_stride,
    out_stride,
    DTYPE: tl.constexpr,
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
    begin(PDL)
    tile, split = tl.program_id(0), tl.program_id(1)
    features = tile * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    is_feature = features < out_features
    rows = tl.arange(0, BLOCK_ROWS)
    is_row = rows < num_rows
    # Features beyond the last read the first one's weights and are never stored, so weights need no mask.
    w_rows = weight + tl.where(is_feature, features, 0).to(tl.int64)[:, None] * in_features
    up_offset = out_features.to(tl.int64) * in_features
    x_rows = x + rows[:, None] * x_stride
    if squares_before is not None:
        squares = read_squares(squares_before, tl.arange(0, BLOCK_OUT), rows, in_features, BLOCK_OUT)

    start, end = part_of_split(split, in_features, BLOCK_IN, NUM_SPLITS)
    sums, up_sums = sum_products(
        w_rows, up_offset, x_rows, is_row, start, end, in_features,
        IS_GATED, IS_PADDED, BLOCK_ROWS, BLOCK_OUT, BLOCK_IN, NUM_STAGES,
    )  # fmt: skip

    if weight_scale is not None:
        sums, up_sums = sums.to(tl.float32), up_sums.to(tl.float32)
    is_last = True
    if NUM_SPLITS > 1:
        sums, is_last = add_splits(sums, partial_sums, num_done, tile, split, BLOCK_ROWS, BLOCK_OUT, NUM_SPLITS)
    if is_last:
        if weight_scale is not None:
            row_scales = tl.load(x_scale + rows, mask=is_row, other=0.0)[None, :]
            w_features = tl.where(is_feature, features, 0)
            sums = sums * tl.load(weight_scale + w_features)[:, None] * row_scales
            if IS_GATED:
                up_sums = up_sums * tl.load(weight_scale + out_features + w_features)[:, None] * row_scales
        if squares_before is not None:
            factors = norm_factors(squares, in_features, eps)
            sums, up_sums = sums * factors, up_sums * factors
        y = write_features(
            out, sums, up_sums, bias, residual, features, rows, is_row, out_features, out_stride,
            ACTIVATION, IS_GATED, DTYPE,
        )  # fmt: skip
        if weight_after is not None:
            write_for_norm(
                y, weight_after, weighted, squares_after, tile, features, rows, is_row, out_features, BLOCK_OUT
            )
