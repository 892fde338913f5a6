"""`ScaledMatmul`: products of FP8 or INT8 codes by torch's matrix products, for many rows.

FP8 runs on the tensor cores' FP8 units by `torch._scaled_mm`, INT8 by `torch._int_mm`; both sum codes, not rounded
numbers.
"""

from __future__ import annotations

from typing import Any

import torch

from services.common.quantization.schemes import Activations, Element
from services.dense_worker.kernels.linear.linear import MAX_IN_FEATURES, Linear
from services.dense_worker.kernels.linear.quantized.operands import InputForm
from services.dense_worker.kernels.linear.quantized.quantized_gemv import codes_form
from services.dense_worker.kernels.linear.quantized.triton_prepare import prepare_input
from services.dense_worker.kernels.triton_launch import KernelLauncher

_MULTIPLE = 16  # of rows and columns of the weights
_MIN_ROWS = 17  # of the input, for INT8


class ScaledMatmul:
    """Multiplies a `ScaledWeight` with an input that is quantized by token or statically."""

    def __init__(self, launcher: KernelLauncher, device: torch.device, dtype: torch.dtype) -> None:
        self._launcher, self._dtype = launcher, dtype
        self._has_fp8 = device.type == "cpu" or torch.cuda.get_device_capability(device) >= (9, 0)

    def why_not(self, linear: Linear) -> str | None:
        """Why these products do not support this layer with many rows; None if they do."""
        weight = linear.weight
        if weight.activations is Activations.NONE:
            return "inputs are not quantized"
        sizes = (linear.in_features, *weight.part_sizes)
        if any(size % _MULTIPLE for size in sizes):
            return f"the projections have {sizes[1:]} rows of {sizes[0]}, torch needs multiples of {_MULTIPLE}"
        if linear.in_features > MAX_IN_FEATURES:
            return f"in_features is {linear.in_features}, at most {MAX_IN_FEATURES} fit"
        if weight.element is Element.FP8 and not self._has_fp8:
            return "FP8 needs compute capability 9.0"
        if weight.element is Element.FP8 and self._dtype is not torch.bfloat16:
            return f"the model's dtype is {self._dtype}, torch's product of FP8 with scales of rows needs bfloat16"
        return None

    def can_multiply(self, linear: Linear, num_rows: int) -> bool:
        """Whether the layer and the number of rows are supported."""
        has_rows = linear.weight.element is Element.FP8 or num_rows >= _MIN_ROWS
        return has_rows and self.why_not(linear) is None

    def input_form(self, linear: Linear) -> InputForm:
        """Codes in their own type."""
        return codes_form(linear.weight, getattr(torch, linear.weight.element))

    def multiply(self, linear: Linear, x: torch.Tensor, out: torch.Tensor, **before: Any) -> None:
        """out = W x + b, in x's dtype, or rounded to it in float32. `before`: what `prepare_input` fuses."""
        weight, bias = linear.weight, linear.bias_data
        form = self.input_form(linear)
        prepared = prepare_input(self._launcher, x, form, **before)
        assert prepared.scale is not None
        multiply = _fp8 if weight.element is Element.FP8 else _int8
        if form.num_versions == 1:
            multiply(prepared.values[0], prepared.scale[0], weight.matrix.data, weight.scale.data, bias, out, x.dtype)
            return
        row = 0
        for version, size in enumerate(weight.part_sizes):
            rows = slice(row, row + size)
            row = rows.stop
            multiply(
                prepared.values[version],
                prepared.scale[version].clone(),  # cuBLAS needs an address that is a multiple of 16
                weight.matrix.data[rows],
                weight.scale.data[rows],
                None if bias is None else bias[rows],
                out[:, rows],
                x.dtype,
            )


def _fp8(
    codes: torch.Tensor,  # [n, in_features]
    scale: torch.Tensor,  # [n, 1]
    matrix: torch.Tensor,  # [rows, in_features]
    matrix_scale: torch.Tensor,  # [rows]
    bias: torch.Tensor | None,  # [rows]
    out: torch.Tensor,  # [n, rows]
    dtype: torch.dtype,
) -> None:
    """Sums are rounded to about 14 bits on the way, as in other servers: it is an eighth faster on an H200."""
    is_target = out.dtype == dtype and out.is_contiguous()
    product = out if is_target else torch.empty(out.shape, dtype=dtype, device=out.device)
    torch._scaled_mm(
        codes, matrix.t(), scale, matrix_scale[None], bias, out_dtype=dtype, use_fast_accum=True, out=product
    )
    if not is_target:
        out.copy_(product)


def _int8(
    codes: torch.Tensor,
    scale: torch.Tensor,
    matrix: torch.Tensor,
    matrix_scale: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    dtype: torch.dtype,
) -> None:
    """Like `_fp8`. The sums are exact; scales and bias are applied in float32."""
    product = (torch._int_mm(codes, matrix.t()) * scale).mul_(matrix_scale)
    out.copy_((product if bias is None else product.add_(bias)).to(dtype))
