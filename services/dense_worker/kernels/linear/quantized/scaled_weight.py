"""`ScaledWeight`: FP8 (e4m3) or INT8 elements with a scale for each output channel.

A checkpoint with one scale for each projection has it repeated, so that merged projections keep their own.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from functools import partial

import torch

from services.common.quantization.schemes import Activations, Element, ScaledScheme
from services.dense_worker.kernels.linear.linear import Projection, multiply_matrix
from services.dense_worker.kernels.linear.quantized.activations import (
    GREATEST,
    multiply_rounded,
    rounded,
    to_codes,
    token_scale,
)
from services.dense_worker.kernels.linear.quantized.layer import FLOATS, QuantizedLayer, checked_scales, converted
from services.dense_worker.parameters import Axes, Loaded, Parameter, Source, StoredTensor, share_of_rows

_STORED = {Element.FP8: "F8_E4M3", Element.INT8: "I8"}
_ONE_NUMBER = ((), (1,), (1, 1))


@dataclass(frozen=True, slots=True)
class ScaledWeight:
    """A WeightFormat: matrix[i, j] * scale[i], for an input that is quantized as `activations` says."""

    matrix: Parameter  # float8_e4m3fn or int8 [out_features, in_features]
    scale: Parameter  # float32 [out_features]
    input_scale: Parameter | None  # float32 [number of projections]: for static activations only
    element: Element
    activations: Activations
    max_activation: float | None  # see `token_scale`
    part_sizes: tuple[int, ...]  # out_features of each projection

    @property
    def kind(self) -> Hashable:
        inputs = self.part_sizes if self.activations is Activations.STATIC else None  # each projection has its own
        return self.element, self.activations, self.max_activation, inputs

    def multiply(
        self, x: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """x [n, in_features] -> [n, out_features]: both factors are dequantized to x's dtype, then multiplied."""
        matrix = (self.matrix.data.float() * self.scale.data[:, None]).to(x.dtype)
        if self.activations is Activations.NONE:
            return multiply_matrix(x, matrix, bias, out)
        if self.activations is Activations.TOKEN:
            x = rounded(x, token_scale(x, self.element, self.max_activation), self.element)
            return multiply_rounded(x, matrix, bias, out)
        parts = zip(self.input_scale.data, matrix.split(self.part_sizes), strict=True)
        products = [multiply_rounded(rounded(x, scale, self.element), rows, None, None) for scale, rows in parts]
        result = torch.cat(products, dim=1) if bias is None else torch.cat(products, dim=1) + bias
        return result if out is None else out.copy_(result)

    def share(self, index: int, count: int) -> ScaledWeight:
        """Views of some projections."""
        sizes = self.part_sizes[: len(self.part_sizes) // count]
        return replace(share_of_rows(self, index, count), part_sizes=sizes)

    def fill_random(self, std: float, generator: torch.Generator) -> None:
        """Normally distributed weights; the scales are such that few are cut off."""
        greatest = GREATEST[self.element]
        self.scale.data.fill_(5 * std / greatest)
        values = torch.empty(self.matrix.data.shape, device=self.matrix.data.device)
        values.normal_(std=std, generator=generator)
        self.matrix.data.copy_(to_codes(values, self.scale.data[:1], self.element))
        if self.input_scale is not None:
            self.input_scale.data.fill_(10 / greatest)


def create_scaled(scheme: ScaledScheme, layer: QuantizedLayer) -> ScaledWeight:
    """A weight that a checkpoint stores as `scheme` says."""

    def matrix(projection: Projection) -> Source:
        shape = (projection.out_features, layer.in_features)
        stored = StoredTensor((f"{projection.name}.weight",), (_STORED[scheme.element],), (shape,), axes=Axes(0, 1))
        return converted(projection.out_features, _unchanged, stored, unit=(1, 1))

    def scale(projection: Projection) -> Source:
        size = projection.out_features
        names = (f"{projection.name}.weight_scale", f"{projection.name}.weight_scale_inv")
        if scheme.is_per_channel:
            stored = StoredTensor(names, FLOATS, ((size, 1), (size,)), axes=Axes(0))
            return converted(size, lambda loaded: checked_scales(loaded).flatten(), stored, unit=(1, None))
        return converted(size, partial(_for_each_row, size), StoredTensor(names, FLOATS, _ONE_NUMBER))

    def input_scale(projection: Projection) -> Source:
        names = (f"{projection.name}.input_scale", f"{projection.name}.activation_scale")
        return converted(1, partial(_for_each_row, 1), StoredTensor(names, FLOATS, _ONE_NUMBER))

    inputs = None
    if scheme.activations is Activations.STATIC:
        inputs = layer.parameter("_input_scale", (len(layer.merged_from),), torch.float32, input_scale)
    return _allocate(layer, matrix, scale, inputs, scheme)


def create_on_the_fly(layer: QuantizedLayer) -> ScaledWeight:
    """An FP8 weight that is made of an unquantized one while it loads, a projection at a time."""

    def source(projection: Projection, convert: Callable[[Loaded], torch.Tensor]) -> Source:
        """Of whole rows: their scales depend on all columns."""
        shape, layout = (projection.out_features, layer.in_features), projection.layout
        axes = Axes(0) if layout is None else layout.axes(2)._replace(columns=None)
        stored_shape = shape if layout is None else layout.stored_shape(shape)
        stored = StoredTensor((f"{projection.name}.weight",), FLOATS, (stored_shape,), axes=axes)

        def restored(loaded: Loaded) -> torch.Tensor:
            return convert(loaded if layout is None else Loaded(loaded.name, layout.restore(loaded.tensor)))

        return converted(projection.out_features, restored, stored, unit=axes.unit)

    scheme = ScaledScheme(Element.FP8, is_per_channel=True, activations=Activations.TOKEN)
    return _allocate(
        layer, lambda each: source(each, _quantized_rows), lambda each: source(each, _scales_of_rows), None, scheme
    )


def _allocate(
    layer: QuantizedLayer,
    matrix: Callable[[Projection], Source],
    scale: Callable[[Projection], Source],
    input_scale: Parameter | None,
    scheme: ScaledScheme,
) -> ScaledWeight:
    size = layer.out_features
    return ScaledWeight(
        layer.parameter("", (size, layer.in_features), getattr(torch, scheme.element), matrix),
        layer.parameter("_scale", (size,), torch.float32, scale),
        input_scale,
        scheme.element,
        scheme.activations,
        scheme.max_activation,
        layer.part_sizes,
    )


def _unchanged(loaded: Loaded) -> torch.Tensor:
    return loaded.tensor


def _for_each_row(num_rows: int, loaded: Loaded) -> torch.Tensor:
    return checked_scales(loaded).flatten().expand(num_rows)


def _scales_of_rows(loaded: Loaded) -> torch.Tensor:
    """The scale of each row of an unquantized matrix, [out_features]."""
    return checked_scales(Loaded(loaded.name, token_scale(loaded.tensor, Element.FP8)[:, 0]))


def _quantized_rows(loaded: Loaded) -> torch.Tensor:
    return to_codes(loaded.tensor, token_scale(loaded.tensor, Element.FP8), Element.FP8)
