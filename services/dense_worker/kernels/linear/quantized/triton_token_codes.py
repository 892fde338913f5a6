"""Quantizes rows with a scale for each: the inputs of products of FP8 and INT8 codes.

A program has a row, in up to three pieces of a power of two features, so that few of them are padding: at many rows its
instructions take the time. What comes before the product is fused, as in `triton_prepare.py`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from services.common.quantization.schemes import Element
from services.dense_worker.kernels.linear.activation import MlpActivation
from services.dense_worker.kernels.linear.quantized.operands import InputForm
from services.dense_worker.kernels.linear.quantized.triton_scales import greater, scale_of_greatest, to_codes
from services.dense_worker.kernels.linear.triton_activation import activated
from services.dense_worker.kernels.norm.norm import RmsNorm
from services.dense_worker.kernels.triton_launch import KernelLauncher, begin

_MAX_PIECES = 3
_MANY_ROWS = 264  # with more, a thread has more features: fewer instructions, and many programs hide their accesses
_MAX_WARPS = 16


def can_quantize(form: InputForm) -> bool:
    """Whether `quantize_rows` makes this form."""
    is_by_row = form.element is not None and form.input_scale is None and form.group_size is None
    return is_by_row and form.order is None and not form.is_split and not form.is_dequantized


def quantize_rows(
    launcher: KernelLauncher,
    x: torch.Tensor,  # [n, in_features], columns contiguous; with a gated activation [n, 2 * in_features]
    form: InputForm,
    norm: RmsNorm | None,  # x is first normalised
    delta: torch.Tensor | None,  # [n, in_features], rows contiguous: before that, it is added to x in place
    activation: MlpActivation | None,  # of x
    out: torch.Tensor,  # [1, n, in_features]
    scale: torch.Tensor,  # float32 [1, n, 1]
) -> None:
    """Writes codes and scales. Every step rounds where separate kernels would."""
    num_rows, in_features = out.shape[1:]
    first, second, third = pieces_of(in_features)
    launcher(
        _quantize_rows_kernel,
        (num_rows,),
        out,
        scale,
        x,
        delta,
        None if norm is None else norm.weight.data,
        in_features,
        x.stride(0),
        0.0 if norm is None else norm.eps,
        float("inf") if form.max_activation is None else form.max_activation,
        IS_FP8=form.element is Element.FP8,
        IS_BOUNDED=form.max_activation is None,
        ACTIVATION=None if activation is None else activation.function.value,
        IS_GATED=activation is not None and activation.is_gated,
        FIRST=first,
        SECOND=second,
        THIRD=third,
        num_warps=_num_warps(in_features, num_rows, norm is not None),
    )


def pieces_of(in_features: int) -> tuple[int, int, int]:
    """Sizes that together are at least `in_features`; 0: no such piece."""
    sizes, rest = list[int](), in_features
    while rest > 0:
        size = triton.next_power_of_2(rest)
        if size > rest and len(sizes) < _MAX_PIECES - 1:
            size //= 2
        sizes.append(size)
        rest -= size
    first, second, third = [*sizes, 0, 0][:_MAX_PIECES]
    return first, second, third


def _num_warps(in_features: int, num_rows: int, has_norm: bool) -> int:
    """A norm's sum has one order for all numbers of rows, so that a token gets the same bits in all steps."""
    per_thread = 32 if num_rows > _MANY_ROWS and not has_norm else 16
    return max(1, min(_MAX_WARPS, triton.next_power_of_2(in_features // (32 * per_thread) + 1) // 2))


@triton.jit
def _quantize_rows_kernel(
    out,
    out_scale,
    x,
    delta,
    norm_weight,
    in_features,
    x_stride,
    eps,
    max_activation,
    IS_FP8: tl.constexpr,
    IS_BOUNDED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    IS_GATED: tl.constexpr,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
    THIRD: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program quantizes a row."""
    row = tl.program_id(0).to(tl.int64)
    begin(PDL)
    a = _read(x, delta, row, in_features, x_stride, 0, FIRST, ACTIVATION, IS_GATED)
    if SECOND > 0:
        b = _read(x, delta, row, in_features, x_stride, FIRST, SECOND, ACTIVATION, IS_GATED)
    if THIRD > 0:
        c = _read(x, delta, row, in_features, x_stride, FIRST + SECOND, THIRD, ACTIVATION, IS_GATED)
    if norm_weight is not None:  # as `normalize` in `norm/triton_norm.py`
        sum_of_squares = tl.sum(a * a, 0, keep_dims=True)
        if SECOND > 0:
            sum_of_squares += tl.sum(b * b, 0, keep_dims=True)
        if THIRD > 0:
            sum_of_squares += tl.sum(c * c, 0, keep_dims=True)
        factor = tl.rsqrt(sum_of_squares / in_features + eps)
        a = _normalized(a, factor, norm_weight, in_features, 0, FIRST)
        if SECOND > 0:
            b = _normalized(b, factor, norm_weight, in_features, FIRST, SECOND)
        if THIRD > 0:
            c = _normalized(c, factor, norm_weight, in_features, FIRST + SECOND, THIRD)
    greatest = tl.reduce(tl.abs(a), 0, greater, keep_dims=True)
    if SECOND > 0:
        greatest = greater(greatest, tl.reduce(tl.abs(b), 0, greater, keep_dims=True))
    if THIRD > 0:
        greatest = greater(greatest, tl.reduce(tl.abs(c), 0, greater, keep_dims=True))
    scale = scale_of_greatest(greatest, max_activation, 448.0 if IS_FP8 else 127.5)
    tl.store(out_scale + row + tl.arange(0, 1), scale)
    _write(out, a, scale, row, in_features, 0, FIRST, IS_FP8, IS_BOUNDED)
    if SECOND > 0:
        _write(out, b, scale, row, in_features, FIRST, SECOND, IS_FP8, IS_BOUNDED)
    if THIRD > 0:
        _write(out, c, scale, row, in_features, FIRST + SECOND, THIRD, IS_FP8, IS_BOUNDED)


@triton.jit
def _read(
    x,
    delta,
    row,
    in_features,
    x_stride,
    START: tl.constexpr,
    SIZE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    IS_GATED: tl.constexpr,
):
    """A piece of a row, float32 [SIZE], with what comes before a norm."""
    columns = START + tl.arange(0, SIZE)
    mask = columns < in_features
    source = x + row * x_stride + columns
    stored = tl.load(source, mask=mask, other=0.0)
    if delta is not None:
        change = tl.load(delta + row * in_features + columns, mask=mask, other=0.0)
        stored = (stored.to(tl.float32) + change.to(tl.float32)).to(stored.dtype)
        tl.store(source, stored, mask=mask)
    values = stored.to(tl.float32)
    if ACTIVATION is not None:
        up = stored
        if IS_GATED:
            up = tl.load(source + in_features, mask=mask, other=0.0)
        values = activated(values, up.to(tl.float32), ACTIVATION, IS_GATED, stored.dtype)
        values = values.to(stored.dtype).to(tl.float32)
    return values


@triton.jit
def _normalized(values, factor, norm_weight, in_features, START: tl.constexpr, SIZE: tl.constexpr):
    columns = START + tl.arange(0, SIZE)
    gain = tl.load(norm_weight + columns, mask=columns < in_features, other=0.0)
    return ((values * factor).to(gain.dtype) * gain).to(tl.float32)


@triton.jit
def _write(
    out,
    values,
    scale,
    row,
    in_features,
    START: tl.constexpr,
    SIZE: tl.constexpr,
    IS_FP8: tl.constexpr,
    IS_BOUNDED: tl.constexpr,
):
    columns = START + tl.arange(0, SIZE)
    codes = to_codes(values, scale, out.dtype.element_ty, IS_FP8, IS_BOUNDED)
    tl.store(out + row * in_features + columns, codes, mask=columns < in_features)
