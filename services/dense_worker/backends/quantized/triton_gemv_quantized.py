"""The product of a quantized layer for one row. Its time is that of reading the codes of the weights.

Like `triton_gemv`, with codes that become float32 in registers. Scales are applied in float32 to the sums, of a group
of features or of all.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from services.dense_worker.backends.quantized.operands import Codes, PreparedInput, QuantizedMatrix
from services.dense_worker.backends.quantized.triton_codes import TRITON_TYPES, codes_in_float32, scales_in_float32
from services.dense_worker.backends.triton_activation import swiglu
from services.dense_worker.backends.triton_launch import KernelLauncher

_MIN_REST_BYTES = 256  # at least a group of features, and 16 bytes for each of some threads


@dataclass(frozen=True, slots=True)
class GemvTiles:
    """Sizes of the kernel's loop: tiles of `block_out` rows of codes, of which `num_stages` - 1 are in flight."""

    block_bytes: int  # a power of two: bytes of a row of codes that the first load of a tile has
    rest_bytes: int  # a power of two: bytes that a second load has; 0: the first one has the whole row
    block_out: int
    num_stages: int
    num_warps: int
    programs_per_sm: int  # programs that run at the same time on an SM


def split_row(row_bytes: int) -> tuple[int, int]:
    """`block_bytes` and `rest_bytes` of a row: the fewest bytes, padding included, in two loads at most."""
    block_bytes = max(triton.next_power_of_2(row_bytes), _MIN_REST_BYTES)
    half = block_bytes // 2
    rest_bytes = max(triton.next_power_of_2(row_bytes - half), _MIN_REST_BYTES)
    return (half, rest_bytes) if rest_bytes < half else (block_bytes, 0)


def choose_tiles(row_bytes: int, per_byte: int, is_gated: bool) -> GemvTiles:
    """The tiles with the fastest layers on an H200: of 7B, 13B and 70B in FP8, and of 7B with two codes in a byte."""
    block_bytes, rest_bytes = split_row(row_bytes)
    if per_byte == 2 and block_bytes <= 4096:
        if is_gated:
            block_out, num_stages, num_warps, programs_per_sm = 8192 // block_bytes, 5, 4, 3
        else:
            block_out, num_stages, num_warps, programs_per_sm = 16384 // block_bytes, 3, 8, 2 if rest_bytes else 4
    elif block_bytes <= 8192:
        num_stages, num_warps, programs_per_sm = 3 if is_gated else 4, 4, 3
        if is_gated and block_bytes == 8192:
            block_out = 1
        elif is_gated and rest_bytes:
            block_out, num_warps, programs_per_sm = 16384 // block_bytes, 8, 2
        else:
            block_out = 16384 // triton.next_power_of_2(block_bytes + rest_bytes)
    else:
        block_out, num_stages, num_warps, programs_per_sm = 32768 // block_bytes, 3 if is_gated else 4, 8, 2
    return GemvTiles(block_bytes, rest_bytes, block_out, num_stages, num_warps, programs_per_sm)


def can_gemv(x: PreparedInput, matrix: QuantizedMatrix) -> bool:
    """Whether the kernel multiplies these: one row in one version, and groups of small powers of two."""
    num_versions, num_rows, _ = x.values.shape
    group_size = matrix.group_size or 1
    has_groups = group_size <= _MIN_REST_BYTES and group_size & (group_size - 1) == 0
    return num_versions == num_rows == 1 and has_groups


def gemv_quantized(
    launcher: KernelLauncher,
    x: PreparedInput,  # see `can_gemv`
    matrix: QuantizedMatrix,
    bias: torch.Tensor | None,  # [matrix's rows]
    out: torch.Tensor,  # [1, out_features], `dtype` or float32; values are rounded to `dtype` in both cases
    dtype: torch.dtype,  # the model's, 16 bits
    *,
    is_gated: bool = False,
    residual: torch.Tensor | None = None,  # [1, out_features]: add it to the result; may be `out`
) -> None:
    """Writes W x + bias to `out`; if is_gated, SiLU of the first half times the second half. Then adds `residual`."""
    out_features, row_bytes = out.shape[1], matrix.matrix.shape[1]
    tiles = choose_tiles(row_bytes, x.values.shape[2] // row_bytes, is_gated)
    rows_per_program = triton.cdiv(out_features, launcher.num_sms * tiles.programs_per_sm)
    launcher(
        _gemv_quantized_kernel,
        (triton.cdiv(out_features, rows_per_program),),
        out,
        x.values,
        x.scale,
        matrix.matrix,
        matrix.scale,
        matrix.zero_point,
        bias,
        residual,
        out_features,
        x.values.shape[2],
        rows_per_program,
        DTYPE=TRITON_TYPES[dtype],
        CODES=int(matrix.codes),
        DEFAULT_ZERO={Codes.UINT4: 8, Codes.UINT8: 128}.get(matrix.codes, 0),
        GROUP_SIZE=matrix.group_size or 0,
        ROW_GROUP_SIZE=matrix.row_group_size,
        IS_GATED=is_gated,
        IS_PADDED=row_bytes < tiles.block_bytes + tiles.rest_bytes,
        BLOCK_BYTES=tiles.block_bytes,
        REST_BYTES=tiles.rest_bytes,
        BLOCK_OUT=tiles.block_out,
        NUM_STAGES=tiles.num_stages,
        num_warps=tiles.num_warps,
    )


@triton.jit
def _load_x(
    x,  # codes or values of the row
    x_scale,  # None, or scales of the row's groups; read if GROUP_SIZE > 0
    row_bytes,
    num_groups,
    FIRST: tl.constexpr,  # byte of the row of codes
    BYTES: tl.constexpr,
    PER_BYTE: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    IS_PADDED: tl.constexpr,
):
    """The features of BYTES bytes of codes, in float32: low ones, high ones; and the sum and scale of each group."""
    columns = FIRST + tl.arange(0, BYTES)
    is_column = columns < row_bytes if IS_PADDED else tl.full([BYTES], True, tl.int1)
    low = tl.load(x + columns, mask=is_column, other=0.0).to(tl.float32)
    high = low
    if PER_BYTE == 2:
        high = tl.load(x + row_bytes + columns, mask=is_column, other=0.0).to(tl.float32)
    if GROUP_SIZE > 0:
        both = low + high if PER_BYTE == 2 else low
        sums = tl.sum(tl.reshape(both, [BYTES * PER_BYTE // GROUP_SIZE, GROUP_SIZE // PER_BYTE]), 1)
        scales = sums
        if x_scale is not None:
            groups = FIRST * PER_BYTE // GROUP_SIZE + tl.arange(0, BYTES * PER_BYTE // GROUP_SIZE)
            scales = tl.load(x_scale + groups, mask=groups < num_groups, other=0.0)
    else:
        sums = tl.zeros([1], tl.float32)
        scales = sums
    return low, high, sums, scales


@triton.jit
def _load_scales(
    scale,
    zero_point,  # None: DEFAULT_ZERO
    w_rows,  # [BLOCK_OUT]: rows of the matrix
    is_row,
    num_groups,
    FIRST: tl.constexpr,  # byte of the row of codes
    BYTES: tl.constexpr,
    CODES: tl.constexpr,
    DEFAULT_ZERO: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    ROW_GROUP_SIZE: tl.constexpr,
):
    """Scales and zero points of the groups of BYTES bytes of each row, float32 [BLOCK_OUT, groups]; or of the rows."""
    if GROUP_SIZE == 0:
        scales = tl.load(scale + w_rows, mask=is_row, other=0.0).to(tl.float32)
        return scales, scales
    else:
        PER_BYTE: tl.constexpr = 2 if CODES >= 3 else 1
        groups = FIRST * PER_BYTE // GROUP_SIZE + tl.arange(0, BYTES * PER_BYTE // GROUP_SIZE)
        is_group = is_row[:, None] & (groups < num_groups)[None, :]
        at = (w_rows // ROW_GROUP_SIZE)[:, None] * num_groups + groups[None, :]
        scales = scales_in_float32(tl.load(scale + at, mask=is_group, other=0), CODES)
        zeros = tl.full(scales.shape, DEFAULT_ZERO, tl.float32)
        if zero_point is not None:
            zeros = tl.load(zero_point + at, mask=is_group, other=0).to(tl.float32)
        return scales, zeros


@triton.jit
def _products(
    octets,  # [BLOCK_OUT, bytes]
    x_low,  # float32 [bytes]: features of the low, or only, codes
    x_high,  # of that shape: features of the high codes
    x_sums,  # float32 [groups]: sums of the features of each group
    x_scales,  # float32 [groups]: scales of the groups of the input; read if HAS_X_SCALES
    scales,
    zeros,
    HAS_X_SCALES: tl.constexpr,
    CODES: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
):
    """The product of a part of BLOCK_OUT rows with x, float32 [BLOCK_OUT], with the scales of groups."""
    low, high = codes_in_float32(octets, CODES)
    products = low * x_low[None, :]
    if CODES >= 3:
        products += high * x_high[None, :]
    if GROUP_SIZE == 0:
        return tl.sum(products, 1)
    else:
        BYTES: tl.constexpr = GROUP_SIZE // (2 if CODES >= 3 else 1)
        sums = tl.sum(tl.reshape(products, [octets.shape[0], octets.shape[1] // BYTES, BYTES]), 2)
        if CODES == 2 or CODES == 3:
            sums -= zeros * x_sums[None, :]
        if HAS_X_SCALES:
            sums *= x_scales[None, :]
        return tl.sum(sums * scales, 1)


@triton.jit(do_not_specialize=["rows_per_program"])
def _gemv_quantized_kernel(
    out,
    x,
    x_scale,
    weight,
    scale,
    zero_point,
    bias,
    residual,
    out_features,
    in_features,
    rows_per_program,
    DTYPE: tl.constexpr,
    CODES: tl.constexpr,
    DEFAULT_ZERO: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    ROW_GROUP_SIZE: tl.constexpr,
    IS_GATED: tl.constexpr,
    IS_PADDED: tl.constexpr,
    BLOCK_BYTES: tl.constexpr,
    REST_BYTES: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program computes `rows_per_program` features."""
    PER_BYTE: tl.constexpr = 2 if CODES >= 3 else 1
    HAS_X_SCALES: tl.constexpr = GROUP_SIZE > 0 and x_scale is not None
    IS_BLOCK_PADDED: tl.constexpr = IS_PADDED and REST_BYTES == 0
    NUM_REST: tl.constexpr = REST_BYTES if REST_BYTES > 0 else 16  # no tensor may be empty
    NUM_GROUPS: tl.constexpr = 1 if GROUP_SIZE == 0 else BLOCK_BYTES * PER_BYTE // GROUP_SIZE
    NUM_REST_GROUPS: tl.constexpr = 1 if GROUP_SIZE * REST_BYTES == 0 else REST_BYTES * PER_BYTE // GROUP_SIZE
    start = tl.program_id(0) * rows_per_program
    end = tl.minimum(start + rows_per_program, out_features)
    if PDL:
        gdc_launch_dependents()
    row_bytes = in_features // PER_BYTE
    num_groups = 1 if GROUP_SIZE == 0 else tl.cdiv(in_features, GROUP_SIZE)
    columns = tl.arange(0, BLOCK_BYTES)
    is_column = columns < row_bytes if IS_BLOCK_PADDED else tl.full([BLOCK_BYTES], True, tl.int1)
    rest_columns = BLOCK_BYTES + tl.arange(0, NUM_REST)
    x_low, rest_low = tl.zeros([BLOCK_BYTES], tl.float32), tl.zeros([NUM_REST], tl.float32)
    x_high, rest_high = x_low, rest_low
    x_sums, rest_sums = tl.zeros([NUM_GROUPS], tl.float32), tl.zeros([NUM_REST_GROUPS], tl.float32)
    x_scales, rest_scales = x_sums, rest_sums
    row_scale = 1.0
    up_offset = out_features.to(tl.int64) * row_bytes
    for first_row in tl.range(start, end, BLOCK_OUT, num_stages=NUM_STAGES):
        rows = first_row + tl.arange(0, BLOCK_OUT)
        is_row = rows < end
        w_rows = weight + rows.to(tl.int64)[:, None] * row_bytes
        mask = is_row[:, None] & is_column[None, :]
        octets = tl.load(w_rows + columns[None, :], mask=mask, other=0)
        if IS_GATED:
            up_octets = tl.load(w_rows + up_offset + columns[None, :], mask=mask, other=0)
        # All loads come before all products, which would delay them.
        scales, zeros = _load_scales(
            scale, zero_point, rows, is_row, num_groups,
            0, BLOCK_BYTES, CODES, DEFAULT_ZERO, GROUP_SIZE, ROW_GROUP_SIZE,
        )  # fmt: skip
        if IS_GATED:
            up_rows = rows + out_features
            up_scales, up_zeros = _load_scales(
                scale, zero_point, up_rows, is_row, num_groups,
                0, BLOCK_BYTES, CODES, DEFAULT_ZERO, GROUP_SIZE, ROW_GROUP_SIZE,
            )  # fmt: skip
        if REST_BYTES > 0:
            rest_mask = is_row[:, None] & (rest_columns < row_bytes)[None, :]
            rest_octets = tl.load(w_rows + rest_columns[None, :], mask=rest_mask, other=0)
            rest_w_scales, rest_zeros = scales, zeros
            if GROUP_SIZE > 0:
                rest_w_scales, rest_zeros = _load_scales(
                    scale, zero_point, rows, is_row, num_groups,
                    BLOCK_BYTES, REST_BYTES, CODES, DEFAULT_ZERO, GROUP_SIZE, ROW_GROUP_SIZE,
                )  # fmt: skip
            if IS_GATED:
                rest_up_octets = tl.load(w_rows + up_offset + rest_columns[None, :], mask=rest_mask, other=0)
                rest_up_scales, rest_up_zeros = up_scales, up_zeros
                if GROUP_SIZE > 0:
                    rest_up_scales, rest_up_zeros = _load_scales(
                        scale, zero_point, up_rows, is_row, num_groups,
                        BLOCK_BYTES, REST_BYTES, CODES, DEFAULT_ZERO, GROUP_SIZE, ROW_GROUP_SIZE,
                    )  # fmt: skip
        if bias is not None:
            biases = tl.load(bias + rows, mask=is_row, other=0.0).to(tl.float32)
            if IS_GATED:
                up_biases = tl.load(bias + up_rows, mask=is_row, other=0.0).to(tl.float32)
        # The wait is in the loop for the same reason as in `triton_gemv`: the loads above come before it.
        if first_row == start:
            if PDL:
                gdc_wait()
            x_low, x_high, x_sums, x_scales = _load_x(
                x, x_scale, row_bytes, num_groups, 0, BLOCK_BYTES, PER_BYTE, GROUP_SIZE, IS_BLOCK_PADDED
            )
            if REST_BYTES > 0:
                rest_low, rest_high, rest_sums, rest_scales = _load_x(
                    x, x_scale, row_bytes, num_groups, BLOCK_BYTES, REST_BYTES, PER_BYTE, GROUP_SIZE, True
                )
            if x_scale is not None and GROUP_SIZE == 0:
                row_scale = tl.load(x_scale)
        if residual is not None:
            residuals = tl.load(residual + rows, mask=is_row, other=0.0).to(tl.float32)
        y = _products(octets, x_low, x_high, x_sums, x_scales, scales, zeros, HAS_X_SCALES, CODES, GROUP_SIZE)
        if REST_BYTES > 0:
            y += _products(
                rest_octets, rest_low, rest_high, rest_sums, rest_scales, rest_w_scales, rest_zeros,
                HAS_X_SCALES, CODES, GROUP_SIZE,
            )  # fmt: skip
        if GROUP_SIZE == 0:
            y *= row_scale * scales
        if bias is not None:
            y += biases
        if IS_GATED:
            up = _products(
                up_octets, x_low, x_high, x_sums, x_scales, up_scales, up_zeros, HAS_X_SCALES, CODES, GROUP_SIZE
            )
            if REST_BYTES > 0:
                up += _products(
                    rest_up_octets, rest_low, rest_high, rest_sums, rest_scales, rest_up_scales, rest_up_zeros,
                    HAS_X_SCALES, CODES, GROUP_SIZE,
                )  # fmt: skip
            if GROUP_SIZE == 0:
                up *= row_scale * up_scales
            if bias is not None:
                up += up_biases
            y = swiglu(y, up, DTYPE)
        if residual is not None:
            y = y.to(DTYPE).to(tl.float32) + residuals
        tl.store(out + rows, y.to(DTYPE).to(out.dtype.element_ty), mask=is_row)
