"""The linear layer of any number of tokens on the tensor cores, with one order of additions for each shape of weights.

A sum over in_features consists of *parts*, whose number depends on the weights' shape and never on the number of rows.
Within a part the tensor cores add one instruction's products after the other, first column to last; what one of them
adds for an element does not depend on how many rows it has. The parts are added in their order. Who computes them
depends on the number of rows, and does not change a bit: with few rows each part has a program of its own, and the one
that ends last adds them; with many, one program computes all parts.

Inputs and weights have 16 bits, or are both codes of FP8, which the tensor cores multiply as such.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl

from services.dense_worker.kernels.linear.activation import MlpActivation
from services.dense_worker.kernels.linear.quantized.triton_codes import TRITON_TYPES
from services.dense_worker.kernels.linear.triton_tiles import (
    SplitWorkspace,
    add_splits,
    part_of_split,
    sum_products,
    write_features,
)
from services.dense_worker.kernels.triton_launch import KernelLauncher, begin

ROW_BUCKETS = (16, 32, 64, 128, 256, 512, 1024, 2048)  # each has kernels of its own; more rows have those of the last
MOST_SPLIT_SUMS = 128 * 128  # of a tile whose parts have programs of their own
_BLOCK_OUT = 64  # of tiles of few rows; the number of parts is that with which these occupy the GPU
_MAX_PARTS = 8
_PART_BLOCK = 256  # a part consists of whole blocks of so many features, but for the last; loops take fewer at a time
_FEW_ROWS = 64  # up to which the time is that of reading the weights
_SPLIT_COLUMNS = 1200  # whose products take as long as adding the parts of several programs


@dataclass(frozen=True, slots=True)
class ProductTiles:
    """Sizes of a program's tile and of its loop; `num_stages` - 1 rounds of loads are in flight."""

    block_rows: int
    block_out: int
    block_in: int
    num_stages: int
    num_warps: int


def num_parts(out_features: int, is_gated: bool, num_sms: int) -> int:
    """The parts of a sum over in_features: so many that the programs of few rows occupy the GPU."""
    parts, num_tiles = 1, triton.cdiv(out_features, _BLOCK_OUT)
    while not is_gated and parts < _MAX_PARTS and num_tiles * parts * 2 <= num_sms:
        parts *= 2
    return parts


def is_split(tiles: ProductTiles, num_rows: int, out_features: int, parts: int, num_sms: int) -> bool:
    """Whether each part has a program of its own: if all of them then run at once."""
    has_room = tiles.block_rows * tiles.block_out <= MOST_SPLIT_SUMS
    return has_room and parts > 1 and _num_programs(tiles, num_rows, out_features) * parts <= num_sms


def choose_product_tiles(
    num_rows: int, out_features: int, in_features: int, itemsize: int, is_gated: bool, num_sms: int
) -> ProductTiles:
    """Tiles for a bucket's most rows, as measured on H100 and H200; none of them changes the order of additions.

    The time of few rows is that of reading the weights. That of more is what the busiest SM loads to its memory.
    """
    if num_rows <= _FEW_ROWS:
        num_stages = 4 if is_gated else 6
        return ProductTiles(max(num_rows, 16), _BLOCK_OUT, 256 // itemsize, num_stages, num_warps=4)
    parts = num_parts(out_features, is_gated, num_sms)
    candidates = [
        ProductTiles(128, 64, 128 // itemsize, num_stages=6, num_warps=8),
        ProductTiles(128, 128, 128 // itemsize, num_stages=4 if is_gated else 6, num_warps=8),
    ]
    if parts == 1 and not is_gated:  # otherwise a program has two sums, too many for the registers
        candidates.append(ProductTiles(256, 128, 128 // itemsize, num_stages=4, num_warps=8))

    def load(tiles: ProductTiles) -> float:
        """In numbers, with what adding the parts of several programs takes."""
        columns = float(in_features)
        if is_split(tiles, num_rows, out_features, parts, num_sms):
            columns = in_features / parts + _SPLIT_COLUMNS
        num_rounds = triton.cdiv(_num_programs(tiles, num_rows, out_features), num_sms)
        return num_rounds * columns * (tiles.block_rows + (1 + is_gated) * tiles.block_out)

    tiles = min(candidates, key=load)
    is_slow_sum = tiles.block_out == 128 and is_split(tiles, num_rows, out_features, parts, num_sms)
    return replace(tiles, num_warps=4) if is_slow_sum else tiles


def _num_programs(tiles: ProductTiles, num_rows: int, out_features: int) -> int:
    return triton.cdiv(num_rows, tiles.block_rows) * triton.cdiv(out_features, tiles.block_out)


def multiply_rows(
    launcher: KernelLauncher,
    x: torch.Tensor,  # [n, in_features], columns contiguous: 16 bits, or codes of e4m3
    x_scale: torch.Tensor | None,  # float32 [n], of codes
    weight: torch.Tensor,  # x's dtype [out_features, in_features]; with a gated activation [2 * out_features, ...]
    weight_scale: torch.Tensor | None,  # float32 [weight's rows], of codes
    bias: torch.Tensor | None,  # [weight's rows]
    out: torch.Tensor,  # [n, out_features], `dtype` or float32; values are rounded to `dtype` in both cases
    dtype: torch.dtype,  # the model's, 16 bits
    workspace: SplitWorkspace,  # for as many programs as there are SMs, of the widest tile
    *,
    activation: MlpActivation | None = None,  # of the product
    residual: torch.Tensor | None = None,  # [n, out_features], strides of `out`: add it; may be `out`
    tiles: ProductTiles | None = None,  # None: those of the bucket of n
) -> None:
    """Writes activation(x W^T + bias) to `out`. Then adds `residual`."""
    num_rows, out_features = out.shape
    in_features = x.shape[1]
    is_gated = activation is not None and activation.is_gated
    # What a bucket compiles does not depend on n.
    bucket = next((bucket for bucket in ROW_BUCKETS if num_rows <= bucket), ROW_BUCKETS[-1])
    tiles = tiles or choose_product_tiles(bucket, out_features, in_features, x.itemsize, is_gated, launcher.num_sms)
    parts = num_parts(out_features, is_gated, launcher.num_sms)
    has_programs = is_split(tiles, bucket, out_features, parts, launcher.num_sms)  # each part
    launcher(
        _product_kernel,
        (
            triton.cdiv(num_rows, tiles.block_rows),
            triton.cdiv(out_features, tiles.block_out),
            parts if has_programs else 1,
        ),
        out,
        x,
        x_scale,
        weight,
        weight_scale,
        bias,
        residual,
        workspace.partial_sums,
        workspace.num_done,
        num_rows,
        out_features,
        in_features,
        x.stride(0),
        out.stride(0),
        DTYPE=TRITON_TYPES[dtype],
        ACTIVATION=None if activation is None else activation.function.value,
        IS_GATED=is_gated,
        IS_PADDED=in_features % _PART_BLOCK != 0,
        BLOCK_ROWS=tiles.block_rows,
        BLOCK_OUT=tiles.block_out,
        BLOCK_IN=tiles.block_in,
        PART_BLOCK=_PART_BLOCK,
        NUM_PARTS=parts,
        IS_SPLIT=has_programs,
        NUM_STAGES=tiles.num_stages,
        num_warps=tiles.num_warps,
    )


@triton.jit(do_not_specialize=["num_rows"])
def _product_kernel(
    out,
    x,
    x_scale,
    weight,
    weight_scale,
    bias,
    residual,
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
    PART_BLOCK: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program computes BLOCK_OUT features of BLOCK_ROWS rows: all parts of their sums, or one if IS_SPLIT."""
    begin(PDL)
    row_tile, feature_tile, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    features = feature_tile * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    rows = row_tile * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    is_row = rows < num_rows
    # Features beyond the last read the first one's weights and are never stored, so weights need no mask.
    w_features = tl.where(features < out_features, features, 0)
    w_rows = weight + w_features.to(tl.int64)[:, None] * in_features
    up_offset = out_features.to(tl.int64) * in_features
    x_rows = x + rows.to(tl.int64)[:, None] * x_stride

    if IS_SPLIT or NUM_PARTS == 1:
        start, end = part_of_split(split, in_features, PART_BLOCK, NUM_PARTS)
        sums, up_sums = sum_products(
            w_rows, up_offset, x_rows, is_row, start, end, in_features,
            IS_GATED, IS_PADDED, BLOCK_ROWS, BLOCK_OUT, BLOCK_IN, NUM_STAGES,
        )  # fmt: skip
    else:
        sums = tl.zeros([BLOCK_OUT, BLOCK_ROWS], tl.float32)
        up_sums = sums
        for part in range(NUM_PARTS):
            start, end = part_of_split(part, in_features, PART_BLOCK, NUM_PARTS)
            of_part, _ = sum_products(
                w_rows, up_offset, x_rows, is_row, start, end, in_features,
                IS_GATED, IS_PADDED, BLOCK_ROWS, BLOCK_OUT, BLOCK_IN, NUM_STAGES,
            )  # fmt: skip
            sums += of_part

    is_last = True
    if IS_SPLIT:
        tile = feature_tile * tl.num_programs(0) + row_tile
        sums, is_last = add_splits(sums, partial_sums, num_done, tile, split, BLOCK_ROWS, BLOCK_OUT, NUM_PARTS)
    if is_last:
        if weight_scale is not None:
            row_scales = tl.load(x_scale + rows, mask=is_row, other=0.0)[None, :]
            sums = sums * tl.load(weight_scale + w_features)[:, None] * row_scales
            if IS_GATED:
                up_sums = up_sums * tl.load(weight_scale + out_features + w_features)[:, None] * row_scales
        write_features(
            out, sums, up_sums, bias, residual, features, rows, is_row, out_features, out_stride,
            ACTIVATION, IS_GATED, DTYPE,
        )  # fmt: skip
