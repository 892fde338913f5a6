"""The product of a quantized layer for one row, with its norm and the quantization of its input.

Its time is that of reading the codes of the weights. Like `triton_gemv`, with words of codes instead of numbers
(`triton_word_products`). Scales are applied in float32 to the sums, of a group of features or of all.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from services.common.quantization.schemes import Element
from services.dense_worker.kernels.linear.activation import MlpActivation
from services.dense_worker.kernels.linear.quantized.gemv_tiles import MIN_REST_BYTES, choose_tiles
from services.dense_worker.kernels.linear.quantized.operands import Codes, InputForm, QuantizedMatrix
from services.dense_worker.kernels.linear.quantized.triton_codes import TRITON_TYPES, scales_in_float32
from services.dense_worker.kernels.linear.quantized.triton_scales import greater
from services.dense_worker.kernels.linear.quantized.triton_word_products import greatest_of, pairs_of_row, word_products
from services.dense_worker.kernels.linear.triton_activation import activated
from services.dense_worker.kernels.norm.norm import RmsNorm
from services.dense_worker.kernels.triton_launch import KernelLauncher

_WORD_BYTES = 4


def can_gemv(num_rows: int, form: InputForm, matrix: QuantizedMatrix) -> bool:
    """Whether the kernel multiplies these: one row in one version, whole words, and groups of small powers of two."""
    group_size = matrix.group_size or MIN_REST_BYTES
    has_groups = 16 <= group_size <= MIN_REST_BYTES and group_size & (group_size - 1) == 0
    has_words = matrix.matrix.shape[1] % _WORD_BYTES == 0
    return num_rows == form.num_versions == 1 and has_groups and has_words


def gemv_quantized(
    launcher: KernelLauncher,
    x: torch.Tensor,  # [1, in_features], `dtype`; in the order of the matrix's columns
    form: InputForm,  # what the reference multiplies, see `can_gemv`
    matrix: QuantizedMatrix,
    bias: torch.Tensor | None,  # [matrix's rows]
    out: torch.Tensor,  # [1, out_features], `dtype` or float32; values are rounded to `dtype` in both cases
    dtype: torch.dtype,  # the model's, 16 bits
    *,
    norm: RmsNorm | None = None,  # normalise x first
    activation: MlpActivation | None = None,  # of the product
    residual: torch.Tensor | None = None,  # [1, out_features]: add it to the result; may be `out`
) -> None:
    """Writes activation(W x + bias) to `out`. Then adds `residual`."""
    out_features, in_features, row_bytes = out.shape[1], x.shape[1], matrix.matrix.shape[1]
    is_gated = activation is not None and activation.is_gated
    per_byte = in_features // row_bytes
    # Triton loads nothing ahead that has fewer than four bytes.
    has_scale_pairs = matrix.codes is Codes.UINT4 and matrix.scale.itemsize == 2 and matrix.scale.shape[-1] % 2 == 0
    rows_per_sm = triton.cdiv(out_features, launcher.num_sms)
    tiles = choose_tiles(row_bytes, per_byte, rows_per_sm, is_gated, has_scale_pairs)
    rows_per_program = triton.cdiv(out_features, launcher.num_sms * tiles.programs_per_sm)
    launcher(
        _gemv_quantized_kernel,
        (triton.cdiv(out_features, rows_per_program),),
        out,
        x[0].view(torch.int32),
        None if norm is None else norm.weight.data.view(torch.int32),
        form.input_scale,
        matrix.matrix.view(torch.int32),
        matrix.scale.view(torch.int32) if has_scale_pairs else matrix.scale,
        matrix.zero_point,
        bias,
        residual,
        out_features,
        in_features,
        row_bytes // _WORD_BYTES,
        rows_per_program,
        0.0 if norm is None else norm.eps,
        float("inf") if form.max_activation is None else form.max_activation,
        DTYPE=TRITON_TYPES[dtype],
        CODES=int(matrix.codes),
        SCALE_PAIRS=TRITON_TYPES[matrix.scale.dtype] if has_scale_pairs else None,
        DEFAULT_ZERO={Codes.UINT4: 8, Codes.UINT8: 128}.get(matrix.codes, 0),
        ELEMENT={None: 0, Element.FP8: 1, Element.INT8: 2}[form.element],
        GROUP_SIZE=matrix.group_size or 0,
        ROW_GROUP_SIZE=matrix.row_group_size,
        ACTIVATION=None if activation is None else activation.function.value,
        IS_GATED=is_gated,
        IS_PADDED=row_bytes < tiles.block_bytes + tiles.rest_bytes,
        BLOCK_WORDS=tiles.block_bytes // _WORD_BYTES,
        REST_WORDS=tiles.rest_bytes // _WORD_BYTES,
        BLOCK_OUT=tiles.block_out,
        NUM_STAGES=tiles.num_stages,
        num_warps=tiles.num_warps,
        # The compiler would take more registers than so many programs have. Single scales of groups need them.
        maxnreg=tiles.registers if has_scale_pairs or matrix.group_size is None else None,
    )


@triton.jit
def _load_features(
    x, in_features, FIRST: tl.constexpr, NUM_WORDS: tl.constexpr, PER_WORD: tl.constexpr, DTYPE: tl.constexpr
):
    """The features of some words, float32 [words] for each feature of a word; zeros beyond the row."""
    features = ()
    for k in tl.static_range(PER_WORD // 2):
        at = (FIRST + tl.arange(0, NUM_WORDS)) * (PER_WORD // 2) + k
        pair = tl.load(x + at, mask=at < in_features // 2, other=0)
        low = (pair & 0xFFFF).to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)
        high = (pair >> 16).to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)
        features = features + (low, high)  # noqa: RUF005 Triton has no starred expressions
    return features


@triton.jit
def _sum_of_squares(features):
    squares = features[0] * features[0]
    for k in tl.static_range(1, len(features)):
        squares += features[k] * features[k]
    return tl.sum(squares)


@triton.jit
def _normalized(features, gains, inverse, DTYPE: tl.constexpr):
    """Rounds as `triton_norm.normalize`."""
    result = ()
    for k in tl.static_range(len(features)):
        value = (features[k] * inverse).to(DTYPE) * gains[k].to(DTYPE)
        result = result + (value.to(tl.float32),)  # noqa: RUF005 as above
    return result


@triton.jit
def _load_row(
    x,
    norm_weight,  # None: no norm
    input_scale,
    in_features,
    eps,
    max_activation,
    CODES: tl.constexpr,
    ELEMENT: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    BLOCK_WORDS: tl.constexpr,
    REST_WORDS: tl.constexpr,
    DTYPE: tl.constexpr,
    PDL: tl.constexpr,
):
    """The row as `pairs_of_row` gives it, for the words of the first and of the second load of a tile."""
    PER_WORD: tl.constexpr = 8 if CODES >= 3 else 4
    if norm_weight is not None:
        gains = _load_features(norm_weight, in_features, 0, BLOCK_WORDS, PER_WORD, DTYPE)
        if REST_WORDS > 0:
            rest_gains = _load_features(norm_weight, in_features, BLOCK_WORDS, REST_WORDS, PER_WORD, DTYPE)
    if PDL:
        gdc_wait()
    values = _load_features(x, in_features, 0, BLOCK_WORDS, PER_WORD, DTYPE)
    rest = values
    if REST_WORDS > 0:
        rest = _load_features(x, in_features, BLOCK_WORDS, REST_WORDS, PER_WORD, DTYPE)
    if norm_weight is not None:
        squares = _sum_of_squares(values)
        if REST_WORDS > 0:
            squares += _sum_of_squares(rest)
        inverse = tl.rsqrt(squares / in_features + eps)
        values = _normalized(values, gains, inverse, DTYPE)
        if REST_WORDS > 0:
            rest = _normalized(rest, rest_gains, inverse, DTYPE)
    NUM_GROUPS: tl.constexpr = BLOCK_WORDS * PER_WORD // GROUP_SIZE if GROUP_SIZE > 0 else 1
    greatest = greatest_of(values, NUM_GROUPS)
    rest_greatest = greatest
    if REST_WORDS > 0:
        NUM_REST_GROUPS: tl.constexpr = REST_WORDS * PER_WORD // GROUP_SIZE if GROUP_SIZE > 0 else 1
        rest_greatest = greatest_of(rest, NUM_REST_GROUPS)
        if GROUP_SIZE == 0:
            greatest = greater(greatest, rest_greatest)
            rest_greatest = greatest
    first = pairs_of_row(values, greatest, input_scale, max_activation, CODES, ELEMENT)
    second = first
    if REST_WORDS > 0:
        second = pairs_of_row(rest, rest_greatest, input_scale, max_activation, CODES, ELEMENT)
    return first, second


@triton.jit
def _load_scales(
    scale,
    zero_point,  # None: DEFAULT_ZERO
    w_rows,  # [BLOCK_OUT]: rows of the matrix
    is_row,
    num_groups,
    FIRST: tl.constexpr,  # word of the row of codes
    NUM_WORDS: tl.constexpr,
    CODES: tl.constexpr,
    SCALE_PAIRS: tl.constexpr,  # `scale` has pairs of numbers of this type; None: it has numbers
    DEFAULT_ZERO: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    ROW_GROUP_SIZE: tl.constexpr,
):
    """Scales and zero points of the groups of some words of each row, float32 [BLOCK_OUT, groups]; or of the rows."""
    if GROUP_SIZE == 0:
        scales = tl.load(scale + w_rows, mask=is_row, other=0.0).to(tl.float32)
        return scales, scales
    else:
        PER_WORD: tl.constexpr = 8 if CODES >= 3 else 4
        NUM_GROUPS: tl.constexpr = NUM_WORDS * PER_WORD // GROUP_SIZE
        groups = FIRST * PER_WORD // GROUP_SIZE + tl.arange(0, NUM_GROUPS)
        is_group = is_row[:, None] & (groups < num_groups)[None, :]
        at = (w_rows // ROW_GROUP_SIZE)[:, None] * num_groups + groups[None, :]
        if SCALE_PAIRS is None:
            scales = scales_in_float32(tl.load(scale + at, mask=is_group, other=0), CODES)
        else:
            two_groups = FIRST * PER_WORD // GROUP_SIZE // 2 + tl.arange(0, NUM_GROUPS // 2)
            are_groups = is_row[:, None] & (two_groups < num_groups // 2)[None, :]
            at_pair = (w_rows // ROW_GROUP_SIZE)[:, None] * (num_groups // 2) + two_groups[None, :]
            pairs = tl.load(scale + at_pair, mask=are_groups, other=0)
            low = (pairs & 0xFFFF).to(tl.int16).to(SCALE_PAIRS, bitcast=True)
            high = (pairs >> 16).to(tl.int16).to(SCALE_PAIRS, bitcast=True)
            scales = tl.reshape(tl.join(low, high), [w_rows.shape[0], NUM_GROUPS]).to(tl.float32)
        zeros = tl.full(scales.shape, DEFAULT_ZERO, tl.float32)
        if zero_point is not None:
            zeros = tl.load(zero_point + at, mask=is_group, other=0).to(tl.float32)
        return scales, zeros


@triton.jit
def _products(
    words,  # [BLOCK_OUT, words]
    row,  # of `pairs_of_row`
    scales,
    zeros,
    CODES: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
):
    """The product of a part of BLOCK_OUT rows with the row, float32 [BLOCK_OUT]; without the scales of rows."""
    pairs, x_sums, x_scales = row
    products = word_products(words, pairs, CODES)
    if GROUP_SIZE == 0:
        return tl.sum(products, 1) * x_scales
    else:
        NUM_GROUPS: tl.constexpr = x_sums.shape[0]
        groups = tl.reshape(products, [words.shape[0], NUM_GROUPS, words.shape[1] // NUM_GROUPS])
        sums = tl.sum(groups, 2) * x_scales[None, :]
        if CODES == 2 or CODES == 3:
            sums -= zeros * x_sums[None, :]
        return tl.sum(sums * scales, 1)


@triton.jit(do_not_specialize=["rows_per_program"])
def _gemv_quantized_kernel(
    out,
    x,
    norm_weight,
    input_scale,
    weight,
    scale,
    zero_point,
    bias,
    residual,
    out_features,
    in_features,
    row_words,
    rows_per_program,
    eps,
    max_activation,
    DTYPE: tl.constexpr,
    CODES: tl.constexpr,
    SCALE_PAIRS: tl.constexpr,
    DEFAULT_ZERO: tl.constexpr,
    ELEMENT: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    ROW_GROUP_SIZE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    IS_GATED: tl.constexpr,
    IS_PADDED: tl.constexpr,
    BLOCK_WORDS: tl.constexpr,
    REST_WORDS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program computes `rows_per_program` features."""
    PER_WORD: tl.constexpr = 8 if CODES >= 3 else 4
    IS_BLOCK_PADDED: tl.constexpr = IS_PADDED and REST_WORDS == 0
    NUM_REST: tl.constexpr = REST_WORDS if REST_WORDS > 0 else 16  # no tensor may be empty
    NUM_GROUPS: tl.constexpr = 1 if GROUP_SIZE == 0 else BLOCK_WORDS * PER_WORD // GROUP_SIZE
    NUM_REST_GROUPS: tl.constexpr = 1 if GROUP_SIZE * REST_WORDS == 0 else REST_WORDS * PER_WORD // GROUP_SIZE
    start = tl.program_id(0) * rows_per_program
    end = tl.minimum(start + rows_per_program, out_features)
    if PDL:
        gdc_launch_dependents()
    num_groups = 1 if GROUP_SIZE == 0 else tl.cdiv(in_features, GROUP_SIZE)
    columns = tl.arange(0, BLOCK_WORDS)
    is_column = columns < row_words if IS_BLOCK_PADDED else tl.full([BLOCK_WORDS], True, tl.int1)
    rest_columns = BLOCK_WORDS + tl.arange(0, NUM_REST)
    no_words, no_groups = tl.zeros([BLOCK_WORDS], tl.int32), tl.zeros([NUM_GROUPS], tl.float32)
    row = ((no_words, no_words, no_words, no_words), no_groups, no_groups)
    no_words, no_groups = tl.zeros([NUM_REST], tl.int32), tl.zeros([NUM_REST_GROUPS], tl.float32)
    rest_row = ((no_words, no_words, no_words, no_words), no_groups, no_groups)
    up_offset = out_features.to(tl.int64) * row_words
    for first_row in tl.range(start, end, BLOCK_OUT, num_stages=NUM_STAGES):
        rows = first_row + tl.arange(0, BLOCK_OUT)
        is_row = rows < end
        w_rows = weight + rows.to(tl.int64)[:, None] * row_words
        mask = is_row[:, None] & is_column[None, :]
        words = tl.load(w_rows + columns[None, :], mask=mask, other=0)
        if IS_GATED:
            up_words = tl.load(w_rows + up_offset + columns[None, :], mask=mask, other=0)
        # All loads come before all products, which would delay them.
        scales, zeros = _load_scales(
            scale, zero_point, rows, is_row, num_groups,
            0, BLOCK_WORDS, CODES, SCALE_PAIRS, DEFAULT_ZERO, GROUP_SIZE, ROW_GROUP_SIZE,
        )  # fmt: skip
        if IS_GATED:
            up_rows = rows + out_features
            up_scales, up_zeros = _load_scales(
                scale, zero_point, up_rows, is_row, num_groups,
                0, BLOCK_WORDS, CODES, SCALE_PAIRS, DEFAULT_ZERO, GROUP_SIZE, ROW_GROUP_SIZE,
            )  # fmt: skip
        if REST_WORDS > 0:
            rest_mask = is_row[:, None] & (rest_columns < row_words)[None, :]
            rest_words = tl.load(w_rows + rest_columns[None, :], mask=rest_mask, other=0)
            rest_scales, rest_zeros = scales, zeros
            if GROUP_SIZE > 0:
                rest_scales, rest_zeros = _load_scales(
                    scale, zero_point, rows, is_row, num_groups,
                    BLOCK_WORDS, REST_WORDS, CODES, SCALE_PAIRS, DEFAULT_ZERO, GROUP_SIZE, ROW_GROUP_SIZE,
                )  # fmt: skip
            if IS_GATED:
                rest_up_words = tl.load(w_rows + up_offset + rest_columns[None, :], mask=rest_mask, other=0)
                rest_up_scales, rest_up_zeros = up_scales, up_zeros
                if GROUP_SIZE > 0:
                    rest_up_scales, rest_up_zeros = _load_scales(
                        scale, zero_point, up_rows, is_row, num_groups,
                        BLOCK_WORDS, REST_WORDS, CODES, SCALE_PAIRS, DEFAULT_ZERO, GROUP_SIZE, ROW_GROUP_SIZE,
                    )  # fmt: skip
        if bias is not None:
            biases = tl.load(bias + rows, mask=is_row, other=0.0).to(tl.float32)
            if IS_GATED:
                up_biases = tl.load(bias + up_rows, mask=is_row, other=0.0).to(tl.float32)
        # `_load_row` waits, in the loop for the same reason as in `triton_gemv`: the loads above come before it.
        if first_row == start:
            loaded, rest_loaded = _load_row(
                x, norm_weight, input_scale, in_features, eps, max_activation,
                CODES, ELEMENT, GROUP_SIZE, BLOCK_WORDS, REST_WORDS, DTYPE, PDL,
            )  # fmt: skip
            row = loaded
            if REST_WORDS > 0:
                rest_row = rest_loaded
        if residual is not None:
            residuals = tl.load(residual + rows, mask=is_row, other=0.0).to(tl.float32)
        y = _products(words, row, scales, zeros, CODES, GROUP_SIZE)
        if REST_WORDS > 0:
            y += _products(rest_words, rest_row, rest_scales, rest_zeros, CODES, GROUP_SIZE)
        if GROUP_SIZE == 0:
            y *= scales
        if bias is not None:
            y += biases
        up = y
        if IS_GATED:
            up = _products(up_words, row, up_scales, up_zeros, CODES, GROUP_SIZE)
            if REST_WORDS > 0:
                up += _products(rest_up_words, rest_row, rest_up_scales, rest_up_zeros, CODES, GROUP_SIZE)
            if GROUP_SIZE == 0:
                up *= up_scales
            if bias is not None:
                up += up_biases
        y = activated(y, up, ACTIVATION, IS_GATED, DTYPE)
        if residual is not None:
            y = y.to(DTYPE).to(tl.float32) + residuals
        tl.store(out + rows, y.to(DTYPE).to(out.dtype.element_ty), mask=is_row)
