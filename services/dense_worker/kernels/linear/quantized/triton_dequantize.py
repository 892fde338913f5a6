"""Dequantizes a matrix, for products of many rows. Its time is that of reading the codes and writing the numbers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from services.dense_worker.kernels.linear.quantized.operands import Codes, QuantizedMatrix
from services.dense_worker.kernels.linear.quantized.triton_codes import codes_in_float32, scales_in_float32
from services.dense_worker.kernels.triton_launch import KernelLauncher

_BLOCK_OUT = 8
_BLOCK_BYTES = 512


def can_dequantize(matrix: QuantizedMatrix) -> bool:
    """Whether a tile of the kernel has whole groups."""
    group_size = matrix.group_size or 1
    return group_size & (group_size - 1) == 0 and group_size <= _BLOCK_BYTES


def dequantize(launcher: KernelLauncher, matrix: QuantizedMatrix, out: torch.Tensor) -> None:
    """Writes (code - zero point) * scale, rounded once, to out [out_features, in_features] of 16 bits.

    If a byte has two codes, the left half gets the low ones and the right half the high ones: columns are in the order
    of an input whose form `is_split`.
    """
    out_features, row_bytes = matrix.matrix.shape
    launcher(
        _dequantize_kernel,
        (triton.cdiv(out_features, _BLOCK_OUT), triton.cdiv(row_bytes, _BLOCK_BYTES)),
        out,
        matrix.matrix,
        matrix.scale,
        matrix.zero_point,
        out_features,
        out.shape[1],
        CODES=int(matrix.codes),
        DEFAULT_ZERO={Codes.UINT4: 8, Codes.UINT8: 128}.get(matrix.codes, 0),
        GROUP_SIZE=matrix.group_size or 0,
        ROW_GROUP_SIZE=matrix.row_group_size,
        BLOCK_OUT=_BLOCK_OUT,
        BLOCK_BYTES=_BLOCK_BYTES,
        num_warps=4,
    )


@triton.jit
def _dequantize_kernel(
    out,
    matrix,
    scale,
    zero_point,
    out_features,
    in_features,
    CODES: tl.constexpr,
    DEFAULT_ZERO: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    ROW_GROUP_SIZE: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_BYTES: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program dequantizes a tile of codes."""
    PER_BYTE: tl.constexpr = 2 if CODES >= 3 else 1
    NUM_GROUPS: tl.constexpr = BLOCK_BYTES * PER_BYTE // GROUP_SIZE if GROUP_SIZE > 0 else 1
    row_bytes = in_features // PER_BYTE
    num_groups = tl.cdiv(in_features, GROUP_SIZE) if GROUP_SIZE > 0 else 1
    rows = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    columns = tl.program_id(1) * BLOCK_BYTES + tl.arange(0, BLOCK_BYTES)
    groups = (tl.program_id(1) * NUM_GROUPS if GROUP_SIZE > 0 else 0) + tl.arange(0, NUM_GROUPS)
    is_row = (rows < out_features)[:, None]
    is_code, is_group = is_row & (columns < row_bytes)[None, :], is_row & (groups < num_groups)[None, :]
    octets = tl.load(matrix + rows.to(tl.int64)[:, None] * row_bytes + columns[None, :], mask=is_code, other=0)
    at = (rows // ROW_GROUP_SIZE)[:, None] * num_groups + groups[None, :]
    scales = scales_in_float32(tl.load(scale + at, mask=is_group, other=0), CODES)[:, :, None]
    zeros = tl.full(scales.shape, DEFAULT_ZERO, tl.float32)
    if zero_point is not None:
        zeros = tl.load(zero_point + at, mask=is_group, other=0).to(tl.float32)[:, :, None]
    if PDL:
        gdc_launch_dependents()
        gdc_wait()  # earlier kernels may still read what `out` was before
    low, high = codes_in_float32(octets, CODES)
    grouped: tl.constexpr = [BLOCK_OUT, NUM_GROUPS, BLOCK_BYTES // NUM_GROUPS]
    target = out + rows.to(tl.int64)[:, None] * in_features + columns[None, :]
    low = tl.reshape((tl.reshape(low, grouped) - zeros) * scales, [BLOCK_OUT, BLOCK_BYTES])
    tl.store(target, low.to(out.dtype.element_ty), mask=is_code)
    if PER_BYTE == 2:
        high = tl.reshape((tl.reshape(high, grouped) - zeros) * scales, [BLOCK_OUT, BLOCK_BYTES])
        tl.store(target + row_bytes, high.to(out.dtype.element_ty), mask=is_code)
