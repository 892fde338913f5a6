"""The product of a quantized layer for 1 to 64 rows. Its time is that of reading the codes of the weights.

Like `triton_skinny`, with codes that become numbers in registers: exactly, in 16 bits. Scales are applied in float32 to
the sums, of a group of features or of all, so nothing is rounded before the end. Where the input has groups of codes of
FP8, too, the tensor cores multiply codes, and round the sum of a group to about 14 bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from services.dense_worker.kernels.linear.activation import MlpActivation
from services.dense_worker.kernels.linear.quantized.operands import BLOCK_IN, BLOCK_OUT, PreparedInput, QuantizedMatrix
from services.dense_worker.kernels.linear.quantized.triton_codes import (
    TRITON_TYPES,
    awaited,
    e2m1_in_16_bits,
    exponents_in_bfloat16,
    scales_in_float32,
    uint4_in_16_bits,
)
from services.dense_worker.kernels.linear.triton_tiles import (
    MAX_ROWS,
    MIN_ROWS,
    SplitWorkspace,
    add_splits,
    part_of_split,
    write_features,
)
from services.dense_worker.kernels.triton_launch import KernelLauncher, begin

_MAX_SPLITS = 16
PROGRAMS_PER_SM = 2  # that splits may lead to; for these the workspace has room
_FEW_PROGRAMS = 8  # the same for the fewest rows of two codes in a byte


def skinny_quantized(
    launcher: KernelLauncher,
    x: PreparedInput,  # n <= MAX_ROWS rows of 16 bits, or of codes of e4m3 for a matrix of such in groups
    matrix: QuantizedMatrix,
    bias: torch.Tensor | None,  # [matrix's rows]
    out: torch.Tensor,  # [n, out_features], `dtype` or float32; values are rounded to `dtype` in both cases
    dtype: torch.dtype,  # the model's, 16 bits
    workspace: SplitWorkspace,
    *,
    activation: MlpActivation | None = None,  # of the product
    residual: torch.Tensor | None = None,  # [n, out_features], strides of `out`: add it; may be `out`
) -> None:
    """Writes activation(x W^T + bias) to `out`. Then adds `residual`."""
    is_gated = activation is not None and activation.is_gated
    num_rows, out_features = out.shape
    num_versions, _, in_features = x.values.shape
    num_tiles = triton.cdiv(out_features, BLOCK_OUT)
    block_rows = max(MIN_ROWS, triton.next_power_of_2(num_rows))
    block_in = 2 * BLOCK_IN if block_rows < MAX_ROWS else BLOCK_IN
    has_pairs = matrix.matrix.shape[1] < in_features
    num_programs = launcher.num_sms * (_FEW_PROGRAMS if has_pairs and block_rows == MIN_ROWS else PROGRAMS_PER_SM)
    num_splits = 1
    while not is_gated and num_splits < _MAX_SPLITS and num_tiles * num_splits * 2 <= num_programs:
        num_splits *= 2
    is_of_codes = x.values.dtype == torch.float8_e4m3fn
    ends = matrix.part_sizes[0], sum(matrix.part_sizes[:2])
    launcher(
        _skinny_quantized_kernel,
        (num_tiles, num_splits),
        out,
        x.values,
        x.scale,
        matrix.matrix.view(torch.float8_e4m3fn) if is_of_codes else matrix.matrix,
        matrix.scale,
        matrix.zero_point,
        bias,
        residual,
        workspace.partial_sums,
        workspace.num_done,
        num_rows,
        out_features,
        in_features,
        *ends,
        x.values.stride(0),
        x.values.stride(1),
        out.stride(0),
        DTYPE=TRITON_TYPES[dtype],
        CODES=int(matrix.codes),
        NUM_VERSIONS=num_versions,
        GROUP_SIZE=matrix.group_size or 0,
        ROW_GROUP_SIZE=matrix.row_group_size,
        ACTIVATION=None if activation is None else activation.function.value,
        IS_GATED=is_gated,
        BLOCK_ROWS=block_rows,
        BLOCK_OUT=BLOCK_OUT,
        BLOCK_IN=block_in,
        DOT_SIZE=matrix.dot_size(x.values.dtype, block_in),
        NUM_SPLITS=num_splits,
        NUM_STAGES=4,
        num_warps=4,
    )


@triton.jit
def _load_codes(tile, mask, zero, CODES: tl.constexpr, DTYPE: tl.constexpr):
    """The numbers of a tile of bytes, in DTYPE: those of the low bits, and those of the high ones if a byte has two.

    `zero` is subtracted from unsigned codes; None: half of their range.
    """
    if tl.float8e4nv == DTYPE:  # of codes
        low = tl.load(tile, mask=mask, other=0.0)
        high = low
    else:
        octets = tl.load(tile, mask=mask, other=0)
        if CODES == 3:
            low, high = uint4_in_16_bits(octets, DTYPE, zero is None)
            if zero is not None:
                low, high = low - zero, high - zero
        elif CODES == 4:
            low, high = e2m1_in_16_bits(octets, DTYPE)
        else:
            if CODES == 0:
                octets = octets.to(tl.float8e4nv, bitcast=True)
            low = octets.to(DTYPE)
            if CODES == 2:
                low -= 128.0 if zero is None else zero
            high = low
    return low, high


@triton.jit
def add_product(
    sums,
    x_row,  # pointers [BLOCK_ROWS, 1]: the rows' starts
    x_scale,  # pointers [BLOCK_ROWS] or None: the scale of the group of features in each row
    w_row,  # pointers [BLOCK_OUT, 1]: the rows' starts
    scale,  # pointers [BLOCK_OUT] or None: the scale of the group, or of the first one if DOT_SIZE has several
    zero_point,  # pointers [BLOCK_OUT] or None
    first,
    is_row,
    in_features,
    CODES: tl.constexpr,
    DOT_SIZE: tl.constexpr,
):
    """sums + the product over DOT_SIZE features from `first`, times the scales of their group if it has some.

    Only groups of E2M1 in bfloat16, whose scales are powers of two, may be several.
    """
    dtype: tl.constexpr = x_row.dtype.element_ty
    zero = None if zero_point is None else tl.load(zero_point).to(dtype)[:, None]
    PER_BYTE: tl.constexpr = 2 if CODES >= 3 else 1
    columns = first // PER_BYTE + tl.arange(0, DOT_SIZE // PER_BYTE)[None, :]
    is_column = columns < in_features // PER_BYTE
    HAS_GROUPS: tl.constexpr = CODES == 4 and DOT_SIZE > 32
    if HAS_GROUPS:
        groups = tl.arange(0, DOT_SIZE // 32)[None, :]
        is_group = first + groups * 32 < in_features
        exponents = exponents_in_bfloat16(tl.load(scale[:, None] + groups, mask=is_group, other=0))
    elif scale is not None:  # before the products, which would delay the loads
        w_scales = scales_in_float32(tl.load(scale), CODES)
        if x_scale is not None:
            x_scales = tl.load(x_scale)
    low, high = _load_codes(w_row + columns, is_column, zero, CODES, dtype)
    x_low = tl.load(x_row + columns, mask=is_row & is_column, other=0.0)
    if scale is None:
        return tl.dot(low, tl.trans(x_low), sums)
    elif HAS_GROUPS:
        grouped: tl.constexpr = [low.shape[0], DOT_SIZE // 32, 16]
        low = tl.reshape(tl.reshape(low, grouped) * exponents[:, :, None], low.shape)
        high = tl.reshape(tl.reshape(high, grouped) * exponents[:, :, None], high.shape)
        x_high = tl.load(x_row + in_features // 2 + columns, mask=is_row & is_column, other=0.0)
        return tl.dot(high, tl.trans(x_high), tl.dot(low, tl.trans(x_low), sums))
    else:
        part = tl.dot(low, tl.trans(x_low))
        if PER_BYTE == 2:
            x_high = tl.load(x_row + in_features // 2 + columns, mask=is_row & is_column, other=0.0)
            part = tl.dot(high, tl.trans(x_high), part)
        part *= w_scales[:, None]
        if x_scale is not None:
            part *= x_scales[None, :]
        return sums + part


@triton.jit
def sum_codes(
    x_row,  # pointers [BLOCK_ROWS, 1]: the rows' starts
    up_x_row,  # those for the second half, if IS_GATED
    x_scale,  # None: none, or one for each whole row, which is not applied here
    x_rows,  # [BLOCK_ROWS]: the numbers of the rows
    w_row,  # pointers [BLOCK_OUT, 1]: the rows' starts
    up_row,  # those of the second half, if IS_GATED
    scale,
    zero_point,  # None: none
    w_features,  # [BLOCK_OUT]: the numbers of the rows of weights
    out_features,
    start,
    end,
    is_row,
    in_features,
    CODES: tl.constexpr,
    GROUP_SIZE: tl.constexpr,  # 0: scales of whole rows, which are not applied here
    ROW_GROUP_SIZE: tl.constexpr,
    IS_GATED: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    DOT_SIZE: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """Sums over the features from start to end, with the scales of their groups: float32 [BLOCK_OUT, BLOCK_ROWS].

    And those of the second half of the weights.
    """
    sums = tl.zeros([BLOCK_OUT, BLOCK_ROWS], tl.float32)
    up_sums = tl.zeros([BLOCK_OUT, BLOCK_ROWS], tl.float32)
    for block in tl.range(start, end, BLOCK_IN, num_stages=NUM_STAGES):
        for i in tl.static_range(BLOCK_IN // DOT_SIZE):
            first = block + i * DOT_SIZE
            w_scale, up_scale, group_scale, zero, up_zero = None, None, None, None, None
            if GROUP_SIZE > 0:
                num_groups = tl.cdiv(in_features, GROUP_SIZE)
                group = tl.minimum(first // GROUP_SIZE, num_groups - 1)
                w_scale = scale + (w_features // ROW_GROUP_SIZE) * num_groups + group
                up_scale = scale + ((w_features + out_features) // ROW_GROUP_SIZE) * num_groups + group
                if zero_point is not None:
                    zero = zero_point + w_features * num_groups + group
                    up_zero = zero_point + (w_features + out_features) * num_groups + group
                if x_scale is not None:
                    group_scale = x_scale + x_rows * num_groups + group
            sums = add_product(
                sums, x_row, group_scale, w_row, w_scale, zero, first, is_row[:, None], in_features, CODES, DOT_SIZE
            )
            if IS_GATED:
                up_sums = add_product(
                    up_sums, up_x_row, group_scale, up_row, up_scale, up_zero, first, is_row[:, None], in_features,
                    CODES, DOT_SIZE,
                )  # fmt: skip
        sums = awaited(sums)
        if IS_GATED:
            up_sums = awaited(up_sums)
    return sums, up_sums


@triton.jit(do_not_specialize=["num_rows", "first_end", "second_end"])
def _skinny_quantized_kernel(
    out,
    x,
    x_scale,
    weight,
    scale,
    zero_point,
    bias,
    residual,
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
    ROW_GROUP_SIZE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    IS_GATED: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    DOT_SIZE: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program computes BLOCK_OUT features of all rows over one of NUM_SPLITS parts of in_features."""
    PER_BYTE: tl.constexpr = 2 if CODES >= 3 else 1
    begin(PDL)
    tile, split = tl.program_id(0), tl.program_id(1)
    features = tile * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    is_feature = features < out_features
    # Features beyond the last read the first one's weights and are never stored, so weights need no mask of rows.
    w_features = tl.where(is_feature, features, 0)
    rows = tl.arange(0, BLOCK_ROWS)
    is_row = rows < num_rows
    x_rows = tl.where(is_row, rows, 0)
    version, up_version = 0, 0
    if NUM_VERSIONS > 1:
        version = (tile * BLOCK_OUT >= first_end).to(tl.int32) + (tile * BLOCK_OUT >= second_end).to(tl.int32)
        version = 0 if IS_GATED else version
        up_version = 1
    x_version_rows = version * num_rows + x_rows
    up_x_version_rows = up_version * num_rows + x_rows

    row_bytes = in_features // PER_BYTE
    w_row = weight + w_features.to(tl.int64)[:, None] * row_bytes
    up_row = weight + (w_features + out_features).to(tl.int64)[:, None] * row_bytes
    x_row = x + version * x_version_stride + x_rows[:, None] * x_stride
    up_x_row = x + up_version * x_version_stride + x_rows[:, None] * x_stride

    start, end = part_of_split(split, in_features, BLOCK_IN, NUM_SPLITS)
    sums, up_sums = sum_codes(
        x_row, up_x_row, x_scale, x_rows, w_row, up_row, scale, zero_point, w_features, out_features, start, end,
        is_row, in_features, CODES, GROUP_SIZE, ROW_GROUP_SIZE, IS_GATED, BLOCK_ROWS, BLOCK_OUT, BLOCK_IN, DOT_SIZE,
        NUM_STAGES,
    )  # fmt: skip

    is_last = True
    if NUM_SPLITS > 1:
        sums, is_last = add_splits(sums, partial_sums, num_done, tile, split, BLOCK_ROWS, BLOCK_OUT, NUM_SPLITS)
    if is_last:
        y, up = sums, up_sums
        if GROUP_SIZE == 0:
            y *= tl.load(scale + w_features).to(tl.float32)[:, None]
            if x_scale is not None:
                y *= tl.load(x_scale + x_version_rows)[None, :]
            if IS_GATED:
                up *= tl.load(scale + out_features + w_features).to(tl.float32)[:, None]
                if x_scale is not None:
                    up *= tl.load(x_scale + up_x_version_rows)[None, :]
        write_features(
            out, y, up, bias, residual, features, rows, is_row, out_features, out_stride, ACTIVATION, IS_GATED, DTYPE
        )  # fmt: skip
