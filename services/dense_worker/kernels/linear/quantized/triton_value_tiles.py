"""The product of a quantized layer for more than 64 rows: codes become the model's numbers in registers, tile by tile.

The numbers are those of `triton_dequantize`, (code - zero point) * scale rounded once, but no matrix of them is written
and read again. A scale of a whole row is applied to the sums, in float32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from services.dense_worker.kernels.linear.quantized.operands import PreparedInput, QuantizedMatrix, largest_power_of_2
from services.dense_worker.kernels.linear.quantized.tile_choice import Tiles
from services.dense_worker.kernels.linear.quantized.triton_codes import (
    TRITON_TYPES,
    awaited,
    codes_in_float32,
    e2m1_in_16_bits,
    exponents_in_bfloat16,
    scales_in_float32,
    uint4_in_16_bits,
)
from services.dense_worker.kernels.linear.triton_tiles import SplitWorkspace, add_splits, part_of_split, write_features
from services.dense_worker.kernels.triton_launch import KernelLauncher, begin


def multiply_value_tiles(
    launcher: KernelLauncher,
    x: PreparedInput,  # rows of the model's dtype, not quantized
    matrix: QuantizedMatrix,  # its projections begin with a tile if the input has several versions
    bias: torch.Tensor | None,  # [out_features]
    out: torch.Tensor,  # [n, out_features], `dtype` or float32; values are rounded to `dtype` in both cases
    dtype: torch.dtype,  # the model's, 16 bits
    workspace: SplitWorkspace,  # has room for the programs of the tiles
    tiles: Tiles,
) -> None:
    """Writes x W^T + bias to `out`."""
    num_rows, out_features = out.shape
    num_versions, _, in_features = x.values.shape
    assert tiles.split_sums(num_rows, out_features) <= len(workspace.partial_sums), (out.shape, tiles)
    launcher(
        _value_tiles_kernel,
        (triton.cdiv(num_rows, tiles.block_rows), triton.cdiv(out_features, tiles.block_out), tiles.num_splits),
        out,
        x.values,
        matrix.matrix,
        matrix.scale,
        matrix.zero_point,
        bias,
        workspace.partial_sums,
        workspace.num_done,
        num_rows,
        out_features,
        in_features,
        matrix.part_sizes[0],
        sum(matrix.part_sizes[:2]),
        x.values.stride(0),
        x.values.stride(1),
        out.stride(0),
        DTYPE=TRITON_TYPES[dtype],
        CODES=int(matrix.codes),
        NUM_VERSIONS=num_versions,
        GROUP_SIZE=matrix.group_size or 0,
        SCALED_SIZE=largest_power_of_2(matrix.group_size or 1, tiles.block_in // 2),
        ROW_GROUP_SIZE=matrix.row_group_size,
        IS_PADDED=in_features % tiles.block_in != 0,
        BLOCK_ROWS=tiles.block_rows,
        BLOCK_OUT=tiles.block_out,
        BLOCK_IN=tiles.block_in,
        NUM_SPLITS=tiles.num_splits,
        NUM_STAGES=tiles.num_stages,
        num_warps=tiles.num_warps,
    )


@triton.jit(do_not_specialize=["num_rows", "first_end", "second_end"])
def _value_tiles_kernel(
    out,
    x,
    weight,
    scale,
    zero_point,
    bias,
    partial_sums,
    num_done,
    num_rows,
    out_features,
    in_features,
    first_end,
    second_end,
    x_version_stride,
    x_stride,
    out_stride,
    DTYPE: tl.constexpr,
    CODES: tl.constexpr,
    NUM_VERSIONS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    SCALED_SIZE: tl.constexpr,
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
    PER_BYTE: tl.constexpr = 2 if CODES >= 3 else 1
    begin(PDL)
    row_tile, feature_tile, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    features = feature_tile * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    rows = row_tile * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    is_row = rows < num_rows
    # What lies beyond the last row or feature reads the first one's and is never stored, so loads need no such masks.
    w_features = tl.where(features < out_features, features, 0)
    version = 0
    if NUM_VERSIONS > 1:
        version = (feature_tile * BLOCK_OUT >= first_end).to(tl.int32)
        version += (feature_tile * BLOCK_OUT >= second_end).to(tl.int32)
    row_bytes = in_features // PER_BYTE
    x_row = x + version * x_version_stride + tl.where(is_row, rows, 0).to(tl.int64)[:, None] * x_stride
    w_row = weight + w_features.to(tl.int64)[:, None] * row_bytes
    scale_row = w_features // ROW_GROUP_SIZE

    start, end = part_of_split(split, in_features, BLOCK_IN, NUM_SPLITS)
    next_scales, next_zeros = None, None
    if GROUP_SIZE > 0:
        at = _places_of_scales(scale_row, start, in_features, GROUP_SIZE, SCALED_SIZE, BLOCK_IN)
        next_scales = tl.load(scale + at)
        if zero_point is not None:
            next_zeros = tl.load(zero_point + at)
    sums = tl.zeros([BLOCK_OUT, BLOCK_ROWS], tl.float32)
    for first in tl.range(start, end, BLOCK_IN, num_stages=NUM_STAGES):
        columns = (first // PER_BYTE + tl.arange(0, BLOCK_IN // PER_BYTE))[None, :]
        is_column = columns < row_bytes if IS_PADDED else tl.full(columns.shape, True, tl.int1)
        octets = tl.load(w_row + columns, mask=is_column, other=0)
        x_low = tl.load(x_row + columns, mask=is_column, other=0.0)
        if PER_BYTE == 2:
            x_high = tl.load(x_row + row_bytes + columns, mask=is_column, other=0.0)
        scales, zeros = next_scales, next_zeros
        if GROUP_SIZE > 0:
            # For the next round, while the tensor cores run: loads of so few bytes are not begun rounds ahead.
            at = _places_of_scales(scale_row, first + BLOCK_IN, in_features, GROUP_SIZE, SCALED_SIZE, BLOCK_IN)
            next_scales = tl.load(scale + at)
            if zero_point is not None:
                next_zeros = tl.load(zero_point + at)
        low, high = _numbers(octets, scales, zeros, CODES, DTYPE)
        sums = tl.dot(low, tl.trans(x_low), sums)
        if PER_BYTE == 2:
            sums = tl.dot(high, tl.trans(x_high), sums)
        sums = awaited(sums)

    is_last = True
    if NUM_SPLITS > 1:
        tile = feature_tile * tl.num_programs(0) + row_tile
        sums, is_last = add_splits(sums, partial_sums, num_done, tile, split, BLOCK_ROWS, BLOCK_OUT, NUM_SPLITS)
    if is_last:
        if GROUP_SIZE == 0:
            sums *= tl.load(scale + w_features).to(tl.float32)[:, None]
        write_features(
            out, sums, sums, bias, None, features, rows, is_row, out_features, out_stride, None, False, DTYPE
        )  # fmt: skip


@triton.jit
def _places_of_scales(
    scale_row, first, in_features, GROUP_SIZE: tl.constexpr, SCALED_SIZE: tl.constexpr, BLOCK_IN: tl.constexpr
):
    """Where the scale of each row and of each SCALED_SIZE of BLOCK_IN features from `first` lies.

    It is never one for the whole tile: with several, Triton keeps the numbers in the registers from which the tensor
    cores read them; with one, it writes them to shared memory and reads them again.
    """
    num_groups = tl.cdiv(in_features, GROUP_SIZE)
    features = first + tl.arange(0, BLOCK_IN // SCALED_SIZE) * SCALED_SIZE
    return scale_row[:, None] * num_groups + tl.minimum(features // GROUP_SIZE, num_groups - 1)[None, :]


@triton.jit
def _numbers(octets, scales, zeros, CODES: tl.constexpr, DTYPE: tl.constexpr):
    """The numbers of a tile of bytes, in DTYPE: those of the low bits, and those of the high ones if a byte has two.

    `scales` and `zeros` [rows, parts of the columns] are as stored. Without scales the codes are the numbers, and
    without zero points half of the range of unsigned codes is subtracted.
    """
    if CODES == 3:
        low, high = uint4_in_16_bits(octets, DTYPE, zeros is None)
        factors = scales.to(DTYPE)
    elif CODES == 4:
        low, high = e2m1_in_16_bits(octets, DTYPE)
        factors = exponents_in_bfloat16(scales) if tl.bfloat16 == DTYPE else scales_in_float32(scales, CODES)
    else:
        low, high = codes_in_float32(octets, CODES)
        if CODES == 2 and zeros is None:
            low -= 128.0
        factors = None if scales is None else scales.to(tl.float32)
    if factors is None:
        low = low.to(DTYPE)
        return low, low
    else:
        low = _scaled(low, factors, zeros, DTYPE)
        if CODES >= 3:
            return low, _scaled(high, factors, zeros, DTYPE)
        else:
            return low, low


@triton.jit
def _scaled(codes, factors, zeros, DTYPE: tl.constexpr):
    """(codes - zeros) * factors, computed in the factors' type or the codes', whichever is wider."""
    GROUPED: tl.constexpr = [codes.shape[0], factors.shape[1], codes.shape[1] // factors.shape[1]]
    grouped = tl.reshape(codes, GROUPED)
    if zeros is not None:
        grouped -= zeros.to(codes.dtype)[:, :, None]
    return tl.reshape((grouped * factors[:, :, None]).to(DTYPE), codes.shape)
