"""Brings the input of a quantized layer into the form that its product reads: reordered, quantized.

What comes before the product is fused: the addition to the residual and its norm, or the activation of an MLP.

Reference of the quantization: `model.quantized.activations`. Codes and scales are those of the reference to the bit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from services.common.quantization.schemes import Element
from services.dense_worker.kernels.linear.activation import MlpActivation
from services.dense_worker.kernels.linear.quantized.operands import InputForm, PreparedInput
from services.dense_worker.kernels.linear.quantized.triton_scales import greater, scale_of_greatest, to_codes
from services.dense_worker.kernels.linear.quantized.triton_token_codes import can_quantize, quantize_rows
from services.dense_worker.kernels.linear.triton_activation import activated
from services.dense_worker.kernels.linear.triton_tiles import MAX_ROWS
from services.dense_worker.kernels.norm.norm import RmsNorm
from services.dense_worker.kernels.norm.triton_norm import normalize
from services.dense_worker.kernels.triton_launch import KernelLauncher, begin


def prepare_input(
    launcher: KernelLauncher,
    x: torch.Tensor,  # [n, in_features], columns contiguous; with a gated activation [n, 2 * in_features]
    form: InputForm,
    norm: RmsNorm | None = None,  # x is first normalised
    *,
    delta: torch.Tensor | None = None,  # [n, in_features], rows contiguous: before that, it is added to x in place
    activation: MlpActivation | None = None,  # of x
) -> PreparedInput:
    """New tensors. Every step rounds where separate kernels would. With `delta`, features keep their order."""
    assert delta is None or form.order is None, "the programs of several orders would each add to the residual"
    num_rows, in_features = x.shape
    if activation is not None and activation.is_gated:
        in_features //= 2
    # A product's copy unit is slow where the rows of a tile are not all there.
    num_there = max(num_rows, MAX_ROWS) if form.num_versions == 1 and num_rows > 1 else num_rows
    values = torch.empty(form.num_versions, num_there, in_features, dtype=form.dtype, device=x.device)[:, :num_rows]
    num_groups = 1 if form.group_size is None else triton.cdiv(in_features, form.group_size)
    scale = None
    if form.element is not None:
        scale = torch.empty(form.num_versions, num_rows, num_groups, dtype=torch.float32, device=x.device)
    if can_quantize(form):
        quantize_rows(launcher, x, form, norm, delta, activation, values, scale)
        return PreparedInput(values, scale)
    block_size = triton.next_power_of_2(in_features)
    versions_each = form.num_versions if form.order is None else 1  # of a program, which has read the row once
    launcher(
        _prepare_kernel,
        (num_rows, form.num_versions // versions_each),
        values,
        scale,
        x,
        delta,
        None if norm is None else norm.weight.data,
        form.input_scale,
        form.order,
        in_features,
        x.stride(0),
        0.0 if norm is None else norm.eps,
        float("inf") if form.max_activation is None else form.max_activation,
        num_groups,
        IS_FP8=form.element is Element.FP8,
        IS_SPLIT=form.is_split,
        IS_QUANTIZED=form.element is not None,
        IS_DEQUANTIZED=form.is_dequantized,
        ACTIVATION=None if activation is None else activation.function.value,
        IS_GATED=activation is not None and activation.is_gated,
        VERSIONS_EACH=versions_each,
        GROUP_SIZE=block_size if form.group_size is None else form.group_size,
        BLOCK_SIZE=max(block_size, form.group_size or 0),
        num_warps=min(max(block_size // 512, 1), 16),
    )
    return PreparedInput(values, scale)


@triton.jit
def _prepare_kernel(
    out,
    out_scale,
    x,
    delta,
    norm_weight,
    input_scale,
    order,
    in_features,
    x_stride,
    eps,
    max_activation,
    num_groups,
    IS_FP8: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    IS_QUANTIZED: tl.constexpr,
    IS_DEQUANTIZED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    IS_GATED: tl.constexpr,
    VERSIONS_EACH: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program prepares a row, in all versions or in one."""
    NUM_BLOCKS: tl.constexpr = BLOCK_SIZE // GROUP_SIZE
    row = tl.program_id(0)
    columns = tl.arange(0, BLOCK_SIZE)
    mask = columns < in_features
    features = columns
    if order is not None:
        features = tl.load(order + tl.program_id(1) * in_features + columns, mask=mask, other=0)
    if norm_weight is not None:
        gain = tl.load(norm_weight + features, mask=mask, other=0.0)
    begin(PDL)
    source = x + row.to(tl.int64) * x_stride + features
    stored = tl.load(source, mask=mask, other=0.0)
    if delta is not None:
        change = tl.load(delta + row.to(tl.int64) * in_features + columns, mask=mask, other=0.0)
        stored = (stored.to(tl.float32) + change.to(tl.float32)).to(stored.dtype)
        tl.store(source, stored, mask=mask)
    values = stored.to(tl.float32)
    if ACTIVATION is not None:
        up = stored
        if IS_GATED:
            up = tl.load(source + in_features, mask=mask, other=0.0)
        values = activated(values, up.to(tl.float32), ACTIVATION, IS_GATED, stored.dtype)
        values = values.to(stored.dtype).to(tl.float32)
    if norm_weight is not None:
        values = normalize(values, gain, in_features, eps, 0).to(tl.float32)
    target_columns = columns
    if IS_SPLIT:
        target_columns = (columns % 2) * (in_features // 2) + columns // 2
    for i in tl.static_range(VERSIONS_EACH):
        version = tl.program_id(1) + i
        out_row = version * tl.num_programs(0) + row
        result = values
        if IS_QUANTIZED:
            groups = tl.arange(0, NUM_BLOCKS)
            grouped = tl.reshape(values, [NUM_BLOCKS, GROUP_SIZE])
            if input_scale is not None:
                scale = tl.zeros([NUM_BLOCKS], tl.float32) + tl.load(input_scale + version)
            else:
                greatest = tl.reduce(tl.abs(grouped), 1, greater)
                scale = scale_of_greatest(greatest, max_activation, 448.0 if IS_FP8 else 127.5)
            tl.store(out_scale + out_row * num_groups + groups, scale, mask=groups < num_groups)
            if IS_DEQUANTIZED:
                grouped = to_codes(grouped, scale[:, None], tl.float32, IS_FP8) * scale[:, None]
            else:
                grouped = to_codes(grouped, scale[:, None], out.dtype.element_ty, IS_FP8)
            result = tl.reshape(grouped, [BLOCK_SIZE])
        target = out + out_row.to(tl.int64) * in_features + target_columns
        tl.store(target, result.to(out.dtype.element_ty), mask=mask)
