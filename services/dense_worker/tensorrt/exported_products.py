"""The products of quantized layers as ONNX and TensorRT get them: torch operators that `onnx_lowering` knows.

Codes are inputs, as the other weights are. A conversion of numbers to codes is recorded as a cast, which becomes
QuantizeLinear with the scale 1, and one of codes to numbers becomes DequantizeLinear. The real scales are factors
beside them, because TensorRT wants constants in these two nodes. Where inputs are quantized, codes are multiplied with
codes (Q/DQ before both factors of a Gemm, which TensorRT runs as a product of 8 bits), and the scales come after it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F

from services.common.errors import ModelError
from services.common.quantization.schemes import Activations, Element
from services.dense_worker.kernels.linear.linear import Linear, WeightFormat
from services.dense_worker.kernels.linear.quantized.activations import to_codes, token_scale
from services.dense_worker.kernels.linear.quantized.block_fp8_weight import BlockFp8Weight
from services.dense_worker.kernels.linear.quantized.grouped_int_weight import GroupedIntWeight
from services.dense_worker.kernels.linear.quantized.mxfp4_weight import Mxfp4Weight
from services.dense_worker.kernels.linear.quantized.scaled_weight import ScaledWeight
from services.dense_worker.model.torch_operations import TorchOperations
from services.dense_worker.parameters import parts_of_type


class ExportedOperations(TorchOperations):
    """`TorchOperations` in which quantized layers are multiplied as above, others by their format's reference."""

    def linear(self, linear: Linear, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """x [n, in_features] -> [n, out_features], in x's dtype."""
        assert out is None, "an exported segment writes to no given tensor"
        product = PRODUCTS.get(type(linear.weight))
        if product is None:
            return linear.weight.multiply(x, linear.bias_data)
        return product(linear.weight, x, linear.bias_data)


def check_exportable(part: Any) -> None:
    """Raises ModelError, naming the layer and its format, for one that has no exported product."""
    for linear in parts_of_type(Linear, part):
        reason = _why_not(linear.weight)
        if reason is not None:
            raise ModelError(f"{linear.name} cannot be exported to ONNX and TensorRT: {reason}")


def _why_not(weight: WeightFormat) -> str | None:
    if isinstance(weight, Mxfp4Weight):
        return f"the format {type(weight).__name__} has no exported product"
    if isinstance(weight, BlockFp8Weight):
        height, width = weight.block_size
        sizes = (weight.matrix.data.shape[1], *weight.part_sizes)
        if sizes[0] % width or any(size % height for size in sizes[1:]):
            return f"its projections have {sizes[1:]} rows of {sizes[0]}, blocks of {height} x {width} must divide them"
    return None


def scaled_product(weight: ScaledWeight, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Codes by codes, if the input is quantized: summed in float32, then times both scales, rounded once."""
    codes, scale = weight.matrix.data.float(), weight.scale.data
    if weight.activations is Activations.NONE:
        return F.linear(x, (codes * scale.unsqueeze(1)).to(x.dtype), bias)
    if weight.activations is Activations.TOKEN:
        product = _product_of_codes(x, token_scale(x, weight.element, weight.max_activation), codes, weight.element)
    else:
        assert weight.input_scale is not None
        rows = [codes] if len(weight.part_sizes) == 1 else codes.split(weight.part_sizes)
        scales = [weight.input_scale.data.select(0, i) for i in range(len(rows))]
        parts = zip(scales, rows, strict=True)
        products = [_product_of_codes(x, scale, part, weight.element) for scale, part in parts]
        product = products[0] if len(products) == 1 else torch.cat(products, dim=1)
    product = product * scale
    return (product if bias is None else product + bias.float()).to(x.dtype)


def block_product(weight: BlockFp8Weight, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Both factors are dequantized to x's dtype, as in the reference: sums of blocks have different scales."""
    height, width = weight.block_size
    rows, columns = weight.matrix.data.shape
    blocks = weight.matrix.data.float().view(rows // height, height, columns // width, width)
    scale = weight.scale.data.view(rows // height, 1, columns // width, 1)
    groups = x.view(-1, columns // width, width)
    input_scale = token_scale(groups, Element.FP8)
    rounded = to_codes(groups, input_scale, Element.FP8).float() * input_scale
    return F.linear(rounded.to(x.dtype).view(-1, columns), (blocks * scale).view(rows, columns).to(x.dtype), bias)


def grouped_product(weight: GroupedIntWeight, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """The matrix is dequantized to x's dtype, as in the reference. ONNX has no bits: bytes are split by division."""
    codes = weight.packed.data.float()
    if weight.num_bits == 4:
        high = (codes * 0.0625).floor()
        codes = torch.stack([codes - high * 16.0, high], dim=-1)
    groups = codes.view(len(weight.scale.data), -1, weight.group_size)
    middle = float(2 ** (weight.num_bits - 1))
    zero = middle if weight.zero_point is None else weight.zero_point.data.float().unsqueeze(2)
    matrix = ((groups - zero) * weight.scale.data.float().unsqueeze(2)).to(x.dtype).view(len(groups), -1)
    if weight.order is None:
        return F.linear(x, matrix, bias)
    orders = [weight.order.data.select(0, i) for i in range(len(weight.part_sizes))]
    parts = zip(orders, matrix.split(weight.part_sizes), strict=True)
    product = torch.cat([F.linear(x.index_select(1, order), rows) for order, rows in parts], dim=1)
    return product if bias is None else product + bias


def _product_of_codes(x: torch.Tensor, scale: torch.Tensor, codes: torch.Tensor, element: Element) -> torch.Tensor:
    """float32 [n, rows]: x / scale as codes, by `codes` of the weights, times scale ([n, 1], or one number)."""
    return F.linear(to_codes(x, scale, element).float(), codes) * scale


PRODUCTS: dict[type, Callable[..., torch.Tensor]] = {
    ScaledWeight: scaled_product,
    BlockFp8Weight: block_product,
    GroupedIntWeight: grouped_product,
}
