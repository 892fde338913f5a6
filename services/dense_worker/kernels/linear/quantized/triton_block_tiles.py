"""The product of FP8 in blocks with inputs of FP8, for more than 64 rows: the codes themselves are multiplied.

Tensor cores sum FP8 with about 14 bits, so each block of features has sums of its own, to which its scales are applied
in float32: as proposed for DeepSeek-V3 (arXiv:2412.19437, section 3.3.2).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from services.dense_worker.kernels.linear.quantized.operands import PreparedInput, QuantizedMatrix
from services.dense_worker.kernels.linear.quantized.tile_choice import Tiles
from services.dense_worker.kernels.linear.quantized.triton_codes import TRITON_TYPES
from services.dense_worker.kernels.linear.triton_tiles import SplitWorkspace, add_splits, part_of_split, write_features
from services.dense_worker.kernels.triton_launch import KernelLauncher, begin


def multiply_block_tiles(
    launcher: KernelLauncher,
    x: PreparedInput,  # one version of e4m3 codes, with scales for each row and block of features
    matrix: QuantizedMatrix,  # e4m3; blocks of multiples of the tile's block_out and block_in
    bias: torch.Tensor | None,  # [out_features]
    out: torch.Tensor,  # [n, out_features], `dtype` or float32; values are rounded to `dtype` in both cases
    dtype: torch.dtype,  # the model's, 16 bits
    workspace: SplitWorkspace,  # has room for the programs of the tiles
    tiles: Tiles,
) -> None:
    """Writes x W^T + bias to `out`."""
    num_rows, out_features = out.shape
    in_features = x.values.shape[2]
    assert matrix.group_size is not None and matrix.group_size % tiles.block_in == 0, matrix.group_size
    assert matrix.row_group_size % tiles.block_out == 0, matrix.row_group_size
    assert tiles.split_sums(num_rows, out_features) <= len(workspace.partial_sums), (out.shape, tiles)
    launcher(
        _block_tiles_kernel,
        (triton.cdiv(num_rows, tiles.block_rows), triton.cdiv(out_features, tiles.block_out), tiles.num_splits),
        out,
        x.values,
        x.scale,
        matrix.matrix.view(torch.float8_e4m3fn),
        matrix.scale,
        bias,
        workspace.partial_sums,
        workspace.num_done,
        num_rows,
        out_features,
        in_features,
        out.stride(0),
        DTYPE=TRITON_TYPES[dtype],
        GROUP_SIZE=matrix.group_size,
        ROW_GROUP_SIZE=matrix.row_group_size,
        IS_PADDED=in_features % tiles.block_in != 0,
        BLOCK_ROWS=tiles.block_rows,
        BLOCK_OUT=tiles.block_out,
        BLOCK_IN=tiles.block_in,
        NUM_SPLITS=tiles.num_splits,
        NUM_STAGES=tiles.num_stages,
        num_warps=tiles.num_warps,
    )


@triton.jit(do_not_specialize=["num_rows"])
def _block_tiles_kernel(
    out,
    x,
    x_scale,
    weight,
    scale,
    bias,
    partial_sums,
    num_done,
    num_rows,
    out_features,
    in_features,
    out_stride,
    DTYPE: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    ROW_GROUP_SIZE: tl.constexpr,
    IS_PADDED: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program computes BLOCK_OUT features of BLOCK_ROWS rows over one of NUM_SPLITS parts of in_features."""
    begin(PDL)
    row_tile, feature_tile, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    features = feature_tile * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    rows = row_tile * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    is_row = rows < num_rows
    # What lies beyond the last row or feature reads the first one's and is never stored, so loads need no such masks.
    x_rows = tl.where(is_row, rows, 0)
    x_row = x + x_rows.to(tl.int64)[:, None] * in_features
    w_row = weight + tl.where(features < out_features, features, 0).to(tl.int64)[:, None] * in_features
    num_groups = tl.cdiv(in_features, GROUP_SIZE)
    x_scale_row = x_scale + x_rows * num_groups
    scale_row = scale + (feature_tile * BLOCK_OUT // ROW_GROUP_SIZE) * num_groups

    start, end = part_of_split(split, in_features, BLOCK_IN, NUM_SPLITS)
    group = tl.minimum(start // GROUP_SIZE, num_groups - 1)
    next_x_scale, next_scale = tl.load(x_scale_row + group), tl.load(scale_row + group)
    sums = tl.zeros([BLOCK_ROWS, BLOCK_OUT], tl.float32)  # so that a thread needs the scales of few rows
    for first in tl.range(start, end, BLOCK_IN, num_stages=NUM_STAGES):
        columns = (first + tl.arange(0, BLOCK_IN))[None, :]
        if IS_PADDED:
            w = tl.load(w_row + columns, mask=columns < in_features, other=0.0)
            x_tile = tl.load(x_row + columns, mask=columns < in_features, other=0.0)
        else:
            w = tl.load(w_row + columns)
            x_tile = tl.load(x_row + columns)
        scales = next_x_scale * next_scale
        # For the next round, while the tensor cores run: no other loads of so few bytes are in flight early.
        group = tl.minimum((first + BLOCK_IN) // GROUP_SIZE, num_groups - 1)
        next_x_scale, next_scale = tl.load(x_scale_row + group), tl.load(scale_row + group)
        sums += tl.dot(x_tile, tl.trans(w)) * scales[:, None]
    sums = tl.trans(sums)

    is_last = True
    if NUM_SPLITS > 1:
        tile = feature_tile * tl.num_programs(0) + row_tile
        sums, is_last = add_splits(sums, partial_sums, num_done, tile, split, BLOCK_ROWS, BLOCK_OUT, NUM_SPLITS)
    if is_last:
        write_features(
            out, sums, sums, bias, None, features, rows, is_row, out_features, out_stride, None, False, DTYPE
        )  # fmt: skip
