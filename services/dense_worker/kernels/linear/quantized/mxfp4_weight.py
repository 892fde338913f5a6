"""`Mxfp4Weight`: FP4 (E2M1) elements, 32 input features with a power of two as their scale.

The format is that of OCP Microscaling Formats 1.0, stored as gpt-oss and compressed-tensors do.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass

import torch

from services.common.errors import ModelError
from services.common.quantization.schemes import Mxfp4Scheme
from services.dense_worker.kernels.linear.linear import Projection, multiply_matrix
from services.dense_worker.kernels.linear.quantized.layer import QuantizedLayer, check_divides, converted
from services.dense_worker.parameters import Axes, Loaded, Parameter, Source, StoredTensor, share_of_rows

GROUP_SIZE = 32
_EXPONENT_BIAS, _NAN = 127, 255  # of a scale, which is an exponent in 8 bits (E8M0)
_STD_OF_RANDOM_CODES = 2.93  # of 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives


@dataclass(frozen=True, slots=True)
class Mxfp4Weight:
    """A WeightFormat: E2M1 codes times 2 ** (exponent - 127). The input is not quantized."""

    packed: Parameter  # uint8 [out_features, in_features / 2]; the low four bits are the feature with the even number
    exponent: Parameter  # uint8 [out_features, in_features / 32]

    @property
    def kind(self) -> Hashable:
        return "mxfp4"

    def dequantize(self, dtype: torch.dtype) -> torch.Tensor:
        """The matrix [out_features, in_features]."""
        packed = self.packed.data
        codes = torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2).int()
        exponent = self.exponent.data.int()[:, :, None] - _EXPONENT_BIAS
        return torch.ldexp(_e2m1(codes).unflatten(1, (-1, GROUP_SIZE)), exponent).flatten(1).to(dtype)

    def multiply(
        self, x: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """x [n, in_features] -> [n, out_features]: the matrix is dequantized to x's dtype, then multiplied."""
        return multiply_matrix(x, self.dequantize(x.dtype), bias, out)

    def share(self, index: int, count: int) -> Mxfp4Weight:
        """Views of some rows."""
        return share_of_rows(self, index, count)

    def fill_random(self, std: float, generator: torch.Generator) -> None:
        """Uniformly distributed codes."""
        self.packed.data.random_(0, 256, generator=generator)
        self.exponent.data.fill_(round(math.log2(std / _STD_OF_RANDOM_CODES)) + _EXPONENT_BIAS)


def create_mxfp4(scheme: Mxfp4Scheme, layer: QuantizedLayer) -> Mxfp4Weight:
    """A weight that a checkpoint stores as `scheme` says. Raises ModelError if its shape does not allow the groups."""
    check_divides(GROUP_SIZE, "in_features", layer.in_features, layer.merged_from[0].name)
    num_groups = layer.in_features // GROUP_SIZE
    names = ("weight_packed", "weight_scale") if scheme.is_compressed_tensors else ("weight_blocks", "weight_scales")

    def packed(projection: Projection) -> Source:
        size = projection.out_features
        shape = (size, layer.in_features // 2) if scheme.is_compressed_tensors else (size, num_groups, GROUP_SIZE // 2)
        axes, stored_shape = _axes(projection), _stored_shape(projection, shape)
        stored = StoredTensor((f"{projection.name}.{names[0]}",), ("U8",), (stored_shape,), axes=axes)
        unit = 1, math.prod(shape[2:])
        return converted(size, lambda loaded: _restored(projection, loaded.tensor).flatten(1), stored, unit=unit)

    def exponent(projection: Projection) -> Source:
        size = projection.out_features
        shape = _stored_shape(projection, (size, num_groups))
        stored = StoredTensor((f"{projection.name}.{names[1]}",), ("U8", "F8_E8M0"), (shape,), axes=_axes(projection))
        return converted(size, lambda loaded: _restored(projection, _checked_exponents(loaded)), stored, unit=(1, 1))

    return Mxfp4Weight(
        layer.parameter("", (layer.out_features, layer.in_features // 2), torch.uint8, packed),
        layer.parameter("_exponent", (layer.out_features, num_groups), torch.uint8, exponent),
    )


def _stored_shape(projection: Projection, shape: tuple[int, ...]) -> tuple[int, ...]:
    return shape if projection.layout is None else projection.layout.stored_shape(shape)


def _axes(projection: Projection) -> Axes:
    return Axes(0, 1) if projection.layout is None else projection.layout.axes(2)


def _restored(projection: Projection, stored: torch.Tensor) -> torch.Tensor:
    return stored if projection.layout is None else projection.layout.restore(stored)


def _e2m1(codes: torch.Tensor) -> torch.Tensor:
    """The values of int32 codes: a sign, two bits of exponent, and one of mantissa, with subnormal numbers."""
    exponent, mantissa = (codes >> 1) & 3, codes & 1
    is_normal = (exponent > 0).int()
    doubled = (2 * is_normal + mantissa) << (exponent - is_normal)
    return doubled * (0.5 - (codes >> 3))


def _checked_exponents(loaded: Loaded) -> torch.Tensor:
    exponents = loaded.tensor.view(torch.uint8)
    if (exponents == _NAN).any():
        index = (exponents == _NAN).nonzero()[0].tolist()
        raise ModelError(f"{loaded.name} holds the scale NaN ({_NAN} as stored) at {index}")
    return exponents
