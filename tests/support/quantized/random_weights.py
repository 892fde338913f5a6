"""Linear layers in every quantized format, with random codes, scales, zero points and orders, for tests of kernels."""

from __future__ import annotations

from collections.abc import Callable

import torch

from services.common.quantization.schemes import Activations, Element
from services.dense_worker.kernels.linear.linear import Cut, Linear, Projection, QuantizedFormat
from services.dense_worker.kernels.linear.quantized.block_fp8_weight import BlockFp8Weight
from services.dense_worker.kernels.linear.quantized.grouped_int_weight import GroupedIntWeight
from services.dense_worker.kernels.linear.quantized.mxfp4_weight import Mxfp4Weight
from services.dense_worker.kernels.linear.quantized.scaled_weight import ScaledWeight
from services.dense_worker.parameters import Parameter

FP8, INT8 = Element.FP8, Element.INT8


class RandomWeights:
    """Weights for a model in `dtype`."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self._device, self._dtype = device, dtype
        self._generator = torch.Generator(device).manual_seed(0)

    def scaled(self, element: Element, activations: Activations, parts: tuple[int, ...], width: int) -> ScaledWeight:
        size = sum(parts)
        inputs = self._uniform(len(parts), low=5 / 448) if activations is Activations.STATIC else None
        weight = ScaledWeight(
            self._empty(size, width, dtype=getattr(torch, element)),
            self._empty(size, dtype=torch.float32),
            inputs,
            element,
            activations,
            1.5 if element is FP8 and len(parts) == 1 else None,
            parts,
        )
        weight.fill_random(width**-0.5, self._generator)
        weight.scale.data.mul_(self._uniform(size, low=0.5).data)
        if inputs is not None:
            inputs.data.mul_(self._uniform(len(parts), low=0.2).data)
        return weight

    def blocks(self, parts: tuple[int, ...], width: int) -> BlockFp8Weight:
        shape = (sum(-(-part // 128) for part in parts), -(-width // 128))
        matrix = self._empty(sum(parts), width, dtype=torch.float8_e4m3fn)
        weight = BlockFp8Weight(matrix, self._empty(*shape, dtype=torch.float32), (128, 128), parts)
        weight.fill_random(width**-0.5, self._generator)
        weight.scale.data.mul_(self._uniform(*shape, low=0.2).data)
        return weight

    def grouped(
        self, num_bits: int, group_size: int, has_zero: bool, has_order: bool, parts: tuple[int, ...], width: int
    ) -> GroupedIntWeight:
        size, num_groups = sum(parts), width // group_size
        weight = GroupedIntWeight(
            self._empty(size, width * num_bits // 8, dtype=torch.uint8),
            self._empty(size, num_groups, dtype=self._dtype),
            self._empty(size, num_groups, dtype=torch.uint8) if has_zero else None,
            self._empty(len(parts), width, dtype=torch.int32) if has_order else None,
            num_bits,
            group_size,
            parts,
        )
        weight.fill_random(width**-0.5, self._generator)
        weight.scale.data.mul_(self._uniform(size, num_groups, low=0.2).data)
        if weight.zero_point is not None:
            weight.zero_point.data.random_(0, 2**num_bits, generator=self._generator)
        return weight

    def mxfp4(self, parts: tuple[int, ...], width: int) -> Mxfp4Weight:
        packed = self._empty(sum(parts), width // 2, dtype=torch.uint8)
        weight = Mxfp4Weight(packed, self._empty(sum(parts), width // 32, dtype=torch.uint8))
        weight.fill_random(width**-0.5, self._generator)
        weight.exponent.data.random_(117, 124, generator=self._generator)
        return weight

    def randn(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self._generator, device=self._device).to(self._dtype)

    def _empty(self, *shape: int, dtype: torch.dtype) -> Parameter:
        return Parameter("w", torch.empty(shape, dtype=dtype, device=self._device), ())

    def _uniform(self, *shape: int, low: float) -> Parameter:
        parameter = self._empty(*shape, dtype=torch.float32)
        parameter.data.uniform_(low, 1.0, generator=self._generator)
        return parameter


def linear_of(weight: QuantizedFormat, parts: tuple[int, ...], width: int, bias: torch.Tensor | None) -> Linear:
    """A merged layer of projections with so many rows."""
    projections = tuple(Projection(f"p{i}", size) for i, size in enumerate(parts))
    bias_parameter = None if bias is None else Parameter("bias", bias, ())
    return Linear("test", width, sum(parts), projections, Cut.OUT, weight, bias_parameter)


Make = Callable[[RandomWeights, tuple[int, ...], int], QuantizedFormat]
KINDS: dict[str, tuple[Make, bool]] = {  # whether inputs are quantized
    "fp8": (lambda w, parts, k: w.scaled(FP8, Activations.NONE, parts, k), False),
    "fp8 token": (lambda w, parts, k: w.scaled(FP8, Activations.TOKEN, parts, k), True),
    "fp8 static": (lambda w, parts, k: w.scaled(FP8, Activations.STATIC, parts, k), True),
    "fp8 blocks": (lambda w, parts, k: w.blocks(parts, k), True),
    "int8": (lambda w, parts, k: w.scaled(INT8, Activations.NONE, parts, k), False),
    "int8 token": (lambda w, parts, k: w.scaled(INT8, Activations.TOKEN, parts, k), True),
    "int8 static": (lambda w, parts, k: w.scaled(INT8, Activations.STATIC, parts, k), True),
    "int4 g32": (lambda w, parts, k: w.grouped(4, 32, False, False, parts, k), False),
    "int4 g64 zero": (lambda w, parts, k: w.grouped(4, 64, True, False, parts, k), False),
    "int4 row order": (lambda w, parts, k: w.grouped(4, k, True, True, parts, k), False),
    "int4 g32 order": (lambda w, parts, k: w.grouped(4, 32, False, True, parts, k), False),
    "int8 g32": (lambda w, parts, k: w.grouped(8, 32, False, False, parts, k), False),
    "int8 g32 zero": (lambda w, parts, k: w.grouped(8, 32, True, False, parts, k), False),
    "mxfp4": (lambda w, parts, k: w.mxfp4(parts, k), False),
}


def in_float32(linear: Linear, x: torch.Tensor) -> torch.Tensor:
    """The product by the format's reference, which rounds only inputs that it quantizes."""
    bias = linear.bias_data
    return linear.weight.multiply(x.float(), None if bias is None else bias.float())
