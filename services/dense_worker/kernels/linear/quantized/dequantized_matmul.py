"""`DequantizedMatmul`: products of many rows whose codes are not multiplied: dequantized by a kernel, then cuBLAS."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from services.dense_worker.kernels.linear.linear import Linear, multiply_matrix
from services.dense_worker.kernels.linear.quantized.block_fp8_weight import BlockFp8Weight
from services.dense_worker.kernels.linear.quantized.operands import InputForm
from services.dense_worker.kernels.linear.quantized.quantized_gemv import OPERANDS, why_not
from services.dense_worker.kernels.linear.quantized.triton_dequantize import can_dequantize, dequantize
from services.dense_worker.kernels.linear.quantized.triton_prepare import prepare_input
from services.dense_worker.kernels.triton_launch import KernelLauncher


class DequantizedMatmul:
    """Multiplies what the streaming kernels multiply, if its groups fit into a tile. Does what the reference does."""

    def __init__(self, launcher: KernelLauncher, dtype: torch.dtype) -> None:
        self._launcher, self._dtype = launcher, dtype

    def can_multiply(self, linear: Linear) -> bool:
        """Whether the layer is supported: its inputs are not quantized, or only by blocks."""
        weight = linear.weight
        if why_not(self._launcher, weight, linear.in_features, self._dtype) is not None:
            return False
        operands = OPERANDS[type(weight)]
        is_plain = operands.input_form(weight, self._dtype).element is None
        return (is_plain or isinstance(weight, BlockFp8Weight)) and can_dequantize(operands.matrix(weight))

    def input_form(self, linear: Linear) -> InputForm:
        """Numbers in the model's dtype; those of blocks are as their codes represent them."""
        form = OPERANDS[type(linear.weight)].input_form(linear.weight, self._dtype)
        return form if form.element is None else replace(form, dtype=self._dtype, is_dequantized=True)

    def multiply(self, linear: Linear, x: torch.Tensor, out: torch.Tensor, **before: Any) -> None:
        """out = W x + b, in x's dtype, or rounded to it in float32. `before`: what `prepare_input` fuses.

        Takes memory for the matrix in x's dtype.
        """
        weight, bias = linear.weight, linear.bias_data
        values = torch.empty(linear.out_features, linear.in_features, dtype=x.dtype, device=x.device)
        dequantize(self._launcher, OPERANDS[type(weight)].matrix(weight), values)
        form = self.input_form(linear)
        inputs = x[None] if form.is_any else prepare_input(self._launcher, x, form, **before).values
        if len(inputs) == 1:
            if out.dtype == x.dtype:
                multiply_matrix(inputs[0], values, bias, out)
            else:
                out.copy_(multiply_matrix(inputs[0], values, bias, None))
            return
        parts = zip(inputs, values.split(weight.part_sizes), strict=True)
        product = torch.cat([multiply_matrix(version, rows, None, None) for version, rows in parts], dim=1)
        out.copy_(product if bias is None else product + bias)
