"""Computes the Triton kernels of quantized layers by torch on a CPU, with their signatures."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace

import torch
from torch.nn import functional as F

from services.dense_worker.kernels.linear.activation import MlpActivation
from services.dense_worker.kernels.linear.quantized.activations import to_codes, token_scale
from services.dense_worker.kernels.linear.quantized.operands import Codes, InputForm, PreparedInput, QuantizedMatrix
from services.dense_worker.kernels.linear.quantized.tile_choice import CODE_TILES, VALUE_TILES, Tiles
from services.dense_worker.kernels.norm.norm import RmsNorm

Tensor = torch.Tensor
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def prepare_input(
    launcher: object,
    x: Tensor,
    form: InputForm,
    norm: RmsNorm | None = None,
    *,
    delta: Tensor | None = None,
    activation: MlpActivation | None = None,
) -> PreparedInput:
    """Each version of the rows: added, normalised, reordered, quantized, and split into even and odd columns."""
    if delta is not None:
        x += delta
    if activation is not None:
        x = activation.apply(x)
    x = x if norm is None else norm.normalize(x)
    values, scales = [], []
    for version in range(form.num_versions):
        row = x if form.order is None else x[:, form.order[version]]
        if form.element is not None:
            width = row.shape[1]
            size = width if form.group_size is None else form.group_size
            groups = F.pad(row, (0, -width % size)).unflatten(1, (-1, size))
            scale = token_scale(groups, form.element, form.max_activation)
            if form.input_scale is not None:
                scale = form.input_scale[version].expand_as(scale)
            codes = to_codes(groups, scale, form.element)
            codes = codes.float() * scale if form.is_dequantized else codes
            row = codes.flatten(1)[:, :width]
            scales.append(scale[:, :, 0])
        values.append(torch.cat([row[:, 0::2], row[:, 1::2]], dim=1) if form.is_split else row)
    return PreparedInput(torch.stack(values).to(form.dtype), torch.stack(scales) if scales else None)


def skinny_quantized(
    launcher: object,
    x: PreparedInput,
    matrix: QuantizedMatrix,
    bias: Tensor | None,
    out: Tensor,
    dtype: torch.dtype,
    workspace: object,
    *,
    activation: MlpActivation | None = None,
    residual: Tensor | None = None,
) -> None:
    """All rows of the matrix by each version of the input, of which every projection takes its own."""
    is_of_codes = x.values.dtype == torch.float8_e4m3fn and matrix.group_size is not None
    assert len(x.values[0]) <= 64 and (is_of_codes or x.values.dtype in (torch.float16, torch.bfloat16))
    product = _product(x, matrix, bias).to(dtype)
    if activation is not None:
        product = activation.apply(product)
    out.copy_(product if residual is None else product + residual)


def multiply_tiles(
    own: Callable[[str, Tensor], AbstractContextManager[None]],
    launcher: object,
    x: PreparedInput,
    matrix: QuantizedMatrix,
    bias: Tensor | None,
    out: Tensor,
    dtype: torch.dtype,
    workspace: object,
    tiles: Tiles,
) -> None:
    """Like `skinny_quantized`, for more rows; blocks get codes in their own type."""
    has_codes = x.values.dtype == torch.float8_e4m3fn
    assert len(out) > 64 and replace(tiles, num_splits=1) in (CODE_TILES if has_codes else VALUE_TILES)
    with own("tiles", out):
        out.copy_(_product(x, matrix, bias).to(dtype))


def _product(x: PreparedInput, matrix: QuantizedMatrix, bias: Tensor | None) -> Tensor:
    """float32 [n, out_features]"""
    weight = dequantized(matrix)
    num_versions, _, width = x.values.shape
    parts = weight.split(matrix.part_sizes if num_versions > 1 else [len(weight)])
    products = []
    for version, part in enumerate(parts):
        values = x.values[version].float()
        if x.scale is not None:
            size = matrix.group_size or width
            values = values * x.scale[version].repeat_interleave(size, dim=1)[:, :width]
        products.append(F.linear(values, part))
    product = torch.cat(products, dim=1)
    return product if bias is None else product + bias.float()


def can_gemv(num_rows: int, form: InputForm, matrix: QuantizedMatrix) -> bool:
    """Any single row, in one version."""
    return num_rows == form.num_versions == 1


def gemv_quantized(
    launcher: object,
    x: Tensor,
    form: InputForm,
    matrix: QuantizedMatrix,
    bias: Tensor | None,
    out: Tensor,
    dtype: torch.dtype,
    *,
    norm: RmsNorm | None = None,
    activation: MlpActivation | None = None,
    residual: Tensor | None = None,
) -> None:
    """The matrix by one row, whose features are in the order of the columns."""
    assert can_gemv(len(x), form, matrix)
    prepared = prepare_input(launcher, x, replace(form, order=None), norm)
    skinny_quantized(launcher, prepared, matrix, bias, out, dtype, None, activation=activation, residual=residual)


def can_dequantize(matrix: QuantizedMatrix) -> bool:
    """All of them."""
    return True


def dequantize(launcher: object, matrix: QuantizedMatrix, out: Tensor) -> None:
    """The whole matrix; of bytes with two codes first the even columns, then the odd ones."""
    out.copy_(dequantized(matrix))


def dequantized(matrix: QuantizedMatrix) -> Tensor:
    """float32 [out_features, in_features]; of bytes with two codes first the even columns, then the odd ones."""
    octets, scale = matrix.matrix, matrix.scale
    if matrix.codes is Codes.E2M1:
        scale = torch.exp2(scale.float() - 127)
    has_two = matrix.codes in (Codes.UINT4, Codes.E2M1)
    if matrix.codes is Codes.E4M3:
        numbers = octets.view(torch.float8_e4m3fn).float()
    else:
        numbers = torch.cat([octets & 15, octets >> 4], dim=1) if has_two else octets
        numbers = E2M1[numbers.long()] if matrix.codes is Codes.E2M1 else numbers.float()
    if matrix.group_size is None:
        return numbers * scale[:, None]
    rows, width = numbers.shape
    columns = torch.arange(width)
    if has_two:
        columns = torch.cat([columns[0::2], columns[1::2]])
    groups = columns // matrix.group_size
    if matrix.codes in (Codes.UINT4, Codes.UINT8):
        middle = 8 if matrix.codes is Codes.UINT4 else 128
        numbers = numbers - (middle if matrix.zero_point is None else matrix.zero_point[:, groups].float())
    return numbers * scale.float()[torch.arange(rows) // matrix.row_group_size][:, groups]
