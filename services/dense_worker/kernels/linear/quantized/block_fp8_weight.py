"""`BlockFp8Weight`: FP8 (e4m3) elements with a scale for each block, as DeepSeek and Qwen publish them."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace

import torch

from services.common.quantization.schemes import BlockFp8Scheme, Element
from services.dense_worker.kernels.linear.linear import Projection
from services.dense_worker.kernels.linear.quantized.activations import (
    GREATEST,
    multiply_rounded,
    rounded_by_groups,
    to_codes,
)
from services.dense_worker.kernels.linear.quantized.layer import FLOATS, QuantizedLayer, checked_scales, converted
from services.dense_worker.parameters import Axes, Loaded, Parameter, Source, StoredTensor, share_of_rows


@dataclass(frozen=True, slots=True)
class BlockFp8Weight:
    """A WeightFormat: each block of the matrix has a scale, and each token one for every block of its features.

    Blocks begin anew with each projection, and the last block of a projection may have fewer rows or columns.
    """

    matrix: Parameter  # float8_e4m3fn [out_features, in_features]
    scale: Parameter  # float32 [blocks of rows of all projections, blocks of columns]
    block_size: tuple[int, int]  # rows, columns
    part_sizes: tuple[int, ...]  # out_features of each projection

    @property
    def kind(self) -> Hashable:
        return "blocks of FP8", self.block_size, self.part_sizes

    def multiply(
        self, x: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """x [n, in_features] -> [n, out_features]: both factors are dequantized to x's dtype, then multiplied."""
        matrix = self.dequantized().to(x.dtype)
        return multiply_rounded(rounded_by_groups(x, self.block_size[1]), matrix, bias, out)

    def dequantized(self) -> torch.Tensor:
        """The matrix, float32 [out_features, in_features]."""
        return self.matrix.data.float() * self._scale_of_elements()

    def share(self, index: int, count: int) -> BlockFp8Weight:
        """Views of some projections."""
        sizes = self.part_sizes[: len(self.part_sizes) // count]
        return replace(share_of_rows(self, index, count), part_sizes=sizes)

    def fill_random(self, std: float, generator: torch.Generator) -> None:
        """Normally distributed weights; the scales are such that few are cut off."""
        self.scale.data.fill_(5 * std / GREATEST[Element.FP8])
        values = torch.empty(self.matrix.data.shape, device=self.matrix.data.device)
        values.normal_(std=std, generator=generator)
        self.matrix.data.copy_(to_codes(values, self.scale.data[:1, :1], Element.FP8))

    def _scale_of_elements(self) -> torch.Tensor:
        """[out_features, in_features]"""
        height, width = self.block_size
        num_blocks = [math.ceil(size / height) for size in self.part_sizes]
        parts = zip(self.scale.data.split(num_blocks), self.part_sizes, strict=True)
        rows = torch.cat([scale[:, None].expand(-1, height, -1).flatten(0, 1)[:size] for scale, size in parts])
        return rows[:, :, None].expand(-1, -1, width).flatten(1)[:, : self.matrix.data.shape[1]]


def create_block_fp8(scheme: BlockFp8Scheme, layer: QuantizedLayer) -> BlockFp8Weight:
    """A weight that a checkpoint stores as `scheme` says."""

    def matrix(projection: Projection) -> Source:
        codes, _ = _stored(scheme, projection, layer.in_features)
        return converted(projection.out_features, lambda loaded: loaded.tensor, codes, unit=(1, 1))

    def scale(projection: Projection) -> Source:
        _, scales = _stored(scheme, projection, layer.in_features)
        return converted(scales.shapes[0][0], checked_scales, scales, unit=(1, 1))

    height, width = scheme.block_size
    scale_shape = sum(math.ceil(size / height) for size in layer.part_sizes), math.ceil(layer.in_features / width)
    return BlockFp8Weight(
        layer.parameter("", (layer.out_features, layer.in_features), torch.float8_e4m3fn, matrix),
        layer.parameter("_scale", scale_shape, torch.float32, scale),
        scheme.block_size,
        layer.part_sizes,
    )


def dequantized_source(
    scheme: BlockFp8Scheme,
    projection: Projection,
    in_features: int,
    num_rows: int,
    take: Callable[[torch.Tensor], torch.Tensor],
) -> Source:
    """A source of `num_rows` rows: what `take` makes of the projection's matrix, float32 [out_features, in_features].

    For layers that are never multiplied as the checkpoint stores them.
    """

    def convert(codes: Loaded, scales: Loaded) -> torch.Tensor:
        matrix, scale = Parameter("", codes.tensor), Parameter("", checked_scales(scales))
        return take(BlockFp8Weight(matrix, scale, scheme.block_size, (projection.out_features,)).dequantized())

    return converted(num_rows, convert, *_stored(scheme, projection, in_features))


def _stored(scheme: BlockFp8Scheme, projection: Projection, in_features: int) -> tuple[StoredTensor, StoredTensor]:
    """The codes and the scales of a projection in a checkpoint."""
    height, width = scheme.block_size
    name, rows = projection.name, projection.out_features
    scale_shape = math.ceil(rows / height), math.ceil(in_features / width)
    return (
        StoredTensor((f"{name}.weight",), ("F8_E4M3",), ((rows, in_features),), axes=Axes(0, 1)),
        StoredTensor((f"{name}.weight_scale_inv", f"{name}.weight_scale"), FLOATS, (scale_shape,), axes=Axes(0, 1)),
    )
