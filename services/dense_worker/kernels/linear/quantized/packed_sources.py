"""How AWQ, GPTQ and compressed-tensors store a `GroupedIntWeight`: names, shapes, orders, and their checks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import torch

from services.common.errors import ModelError
from services.common.quantization.schemes import GroupedIntScheme, Packing
from services.dense_worker.kernels.linear.linear import Projection
from services.dense_worker.kernels.linear.quantized.grouped_int_weight import (
    WORD_BITS,
    GroupedIntWeight,
    pack,
    unpack,
    unpack_awq,
)
from services.dense_worker.kernels.linear.quantized.layer import (
    FLOATS,
    QuantizedLayer,
    check_divides,
    checked_scales,
    converted,
)
from services.dense_worker.parameters import Axes, Loaded, Source, StoredTensor


def create_grouped_int(scheme: GroupedIntScheme, layer: QuantizedLayer) -> GroupedIntWeight:
    """A weight that a checkpoint stores as `scheme` says. Raises ModelError if its shape does not allow the groups."""
    name, per_word = layer.merged_from[0].name, WORD_BITS // scheme.num_bits
    group_size = scheme.group_size or layer.in_features
    check_divides(group_size, "in_features", layer.in_features, name)
    check_divides(per_word, "in_features", layer.in_features, name)
    if scheme.packing is not Packing.COMPRESSED_TENSORS:
        for projection in layer.merged_from:
            check_divides(per_word, "out_features", projection.out_features, projection.name)
    num_groups = layer.in_features // group_size
    sources = _SOURCES[scheme.packing](scheme, layer.in_features, group_size)
    size = layer.out_features
    row_bytes = layer.in_features * scheme.num_bits // 8
    zero_point = order = None
    if not scheme.is_symmetric:
        zero_point = layer.parameter("_zero_point", (size, num_groups), torch.uint8, sources.zero_point)
    if scheme.has_order:
        order = layer.parameter("_order", (len(layer.merged_from), layer.in_features), torch.int32, sources.order)
    return GroupedIntWeight(
        layer.parameter("", (size, row_bytes), torch.uint8, lambda each: _as_bytes(sources.packed(each))),
        layer.parameter("_scale", (size, num_groups), layer.dtype, partial(sources.scale, layer.dtype)),
        zero_point,
        order,
        scheme.num_bits,
        group_size,
        layer.part_sizes,
    )


def _as_bytes(words: Source) -> Source:
    """The same source, whose rows of int32 become rows of bytes."""
    assert words.conversion is not None
    convert, (rows, columns) = words.conversion.convert, words.conversion.unit

    def as_bytes(*loaded: Loaded | None) -> torch.Tensor:
        made = convert(*loaded)
        return made.flatten().view(torch.uint8).view(len(made), -1)  # also where a row is one word

    unit = rows, columns and columns * WORD_BITS // 8
    return replace(words, conversion=replace(words.conversion, convert=as_bytes, unit=unit))


@dataclass(frozen=True, slots=True)
class _Sources:
    """The sources of one packing. Shapes are those of a projection."""

    scheme: GroupedIntScheme
    in_features: int
    group_size: int

    @property
    def num_groups(self) -> int:
        return self.in_features // self.group_size

    @property
    def per_word(self) -> int:
        return WORD_BITS // self.scheme.num_bits

    @property
    def unit_of_words(self) -> tuple[int, int | None]:
        """Rows, and words of a row, that can be made alone where a word holds features of one row.

        With act-order a row's features come from all of its words.
        """
        return 1, None if self.scheme.has_order else 1

    def index(self, projection: Projection) -> StoredTensor:
        """The group of each input feature. Without act-order it may be absent."""
        name = "weight_g_idx" if self.scheme.packing is Packing.COMPRESSED_TENSORS else "g_idx"
        is_optional = not self.scheme.has_order
        return StoredTensor((f"{projection.name}.{name}",), ("I32", "I64"), ((self.in_features,),), is_optional)

    def order(self, projection: Projection) -> Source:
        """The row of `GroupedIntWeight.order`."""
        return converted(1, lambda index: self.sorted_features(index)[None], self.index(projection))

    def sorted_features(self, index: Loaded) -> torch.Tensor:
        """The input features, group by group. Raises ModelError for an index that is no grouping."""
        groups = index.tensor.long()
        bad = (groups < 0) | (groups >= self.num_groups)
        if bad.any():
            at = int(bad.nonzero()[0])
            raise ModelError(
                f"{index.name} holds the group {groups[at].item()} at {at}, expected 0 to {self.num_groups - 1}"
            )
        counts = torch.bincount(groups, minlength=self.num_groups)
        wrong = (counts != self.group_size).nonzero()
        if len(wrong):
            group = int(wrong[0])
            raise ModelError(
                f"{index.name} gives group {group} {counts[group].item()} features, group_size is {self.group_size}"
            )
        return torch.argsort(groups, stable=True)

    def in_order(self, words: torch.Tensor, index: Loaded | None) -> torch.Tensor:
        """The words [out_features, words] with neighbouring columns for each group."""
        if index is None:
            return words
        if self.scheme.has_order:
            return pack(unpack(words, self.scheme.num_bits)[:, self.sorted_features(index)], self.scheme.num_bits)
        expected = torch.arange(self.in_features, device=index.tensor.device) // self.group_size
        if not torch.equal(index.tensor.long(), expected):
            raise ModelError(f"{index.name} reorders input features, but the config says that there is no act-order")
        return words


class _CompressedTensorsSources(_Sources):
    """pack-quantized: rows of output channels, signed codes stored with an offset of half of the range."""

    def packed(self, projection: Projection) -> Source:
        size, name = projection.out_features, projection.name
        num_words = self.in_features // self.per_word
        words = StoredTensor((f"{name}.weight_packed",), ("I32",), ((size, num_words),), axes=Axes(0, 1))
        shape = StoredTensor((f"{name}.weight_shape",), ("I32", "I64"), ((2,),))

        def convert(packed: Loaded, shape: Loaded, index: Loaded | None) -> torch.Tensor:
            if shape.tensor.tolist() != [size, self.in_features]:
                raise ModelError(f"{shape.name} is {shape.tensor.tolist()}, expected {[size, self.in_features]}")
            return self.in_order(packed.tensor, index)

        return converted(size, convert, words, shape, self.index(projection), unit=self.unit_of_words)

    def scale(self, dtype: torch.dtype, projection: Projection) -> Source:
        shape = (projection.out_features, self.num_groups)
        stored = StoredTensor((f"{projection.name}.weight_scale",), FLOATS, (shape,), axes=Axes(0, 1))
        return converted(projection.out_features, partial(checked_scales, dtype=dtype), stored, unit=(1, 1))

    def zero_point(self, projection: Projection) -> Source:
        """Packed along the output channels, or in older files one signed byte for each."""
        size, num_bits = projection.out_features, self.scheme.num_bits
        shapes = (-(-size // self.per_word), self.num_groups), (size, self.num_groups)
        stored = StoredTensor((f"{projection.name}.weight_zero_point",), ("I32", "I8"), shapes)

        def convert(zero_point: Loaded) -> torch.Tensor:
            is_packed = zero_point.tensor.dtype == torch.int32
            if tuple(zero_point.tensor.shape) != shapes[0 if is_packed else 1]:
                dtype, shape = zero_point.tensor.dtype, tuple(zero_point.tensor.shape)
                raise ModelError(f"{zero_point.name} has shape {shape} in {dtype}, expected {shapes[not is_packed]}")
            if is_packed:
                return unpack(zero_point.tensor.t(), num_bits).t()[:size]
            return (zero_point.tensor.int() + 2 ** (num_bits - 1)).to(torch.uint8)

        return converted(size, convert, stored)


class _AwqSources(_Sources):
    """AutoAWQ: rows of input features; eight output channels in a word, in an order of its own."""

    def packed(self, projection: Projection) -> Source:
        size = projection.out_features
        shape = (self.in_features, size // self.per_word)
        stored = StoredTensor((f"{projection.name}.qweight",), ("I32",), (shape,), axes=Axes(1, 0))

        def convert(words: Loaded) -> torch.Tensor:
            return pack(unpack_awq(words.tensor).t(), self.scheme.num_bits)

        return converted(size, convert, stored, unit=(self.per_word, 1))

    def scale(self, dtype: torch.dtype, projection: Projection) -> Source:
        return _scales_by_group(self.num_groups, dtype, projection)

    def zero_point(self, projection: Projection) -> Source:
        size = projection.out_features
        shape = (self.num_groups, size // self.per_word)
        stored = StoredTensor((f"{projection.name}.qzeros",), ("I32",), (shape,), axes=Axes(1, 0))
        return converted(size, lambda loaded: unpack_awq(loaded.tensor).t(), stored, unit=(self.per_word, 1))


class _GptqSources(_Sources):
    """AutoGPTQ and GPTQModel: several input features in a word, and zero points that version 1 stores less one."""

    def packed(self, projection: Projection) -> Source:
        size = projection.out_features
        shape = (self.in_features // self.per_word, size)
        stored = StoredTensor((f"{projection.name}.qweight",), ("I32",), (shape,), axes=Axes(1, 0))

        def convert(words: Loaded, index: Loaded | None) -> torch.Tensor:
            return self.in_order(words.tensor.t(), index)

        return converted(size, convert, stored, self.index(projection), unit=self.unit_of_words)

    def scale(self, dtype: torch.dtype, projection: Projection) -> Source:
        """Symmetric checkpoints have zero points, too, which must all be half of the range."""
        scales = _scales_by_group(self.num_groups, dtype, projection)
        if not self.scheme.is_symmetric:
            return scales
        assert scales.conversion is not None
        convert = scales.conversion.convert

        def checked(scales: Loaded, zeros: Loaded) -> torch.Tensor:
            found, middle = self._zero_points(zeros), 2 ** (self.scheme.num_bits - 1)
            if (found != middle).any():
                value = found[found != middle][0].item()
                raise ModelError(f"{zeros.name} holds the zero point {value}, the config's sym means {middle}")
            return convert(scales)

        inputs = (*scales.conversion.inputs, self._stored_zeros(projection))
        return converted(projection.out_features, checked, *inputs, unit=(self.per_word, 1))

    def zero_point(self, projection: Projection) -> Source:
        zeros = self._stored_zeros(projection)
        return converted(projection.out_features, self._zero_points, zeros, unit=(self.per_word, 1))

    def _stored_zeros(self, projection: Projection) -> StoredTensor:
        shape = (self.num_groups, projection.out_features // self.per_word)
        return StoredTensor((f"{projection.name}.qzeros",), ("I32",), (shape,), axes=Axes(1, 0))

    def _zero_points(self, zeros: Loaded) -> torch.Tensor:
        """uint8 [out_features, groups]. Version 1 stores 0 less one as the greatest code: it wraps around."""
        stored = unpack(zeros.tensor, self.scheme.num_bits).t()
        offset = 1 if self.scheme.packing is Packing.GPTQ else 0
        return (stored + offset) & (2**self.scheme.num_bits - 1)


def _scales_by_group(num_groups: int, dtype: torch.dtype, projection: Projection) -> Source:
    """Scales that are stored as [groups, out_features]."""
    shape = (num_groups, projection.out_features)
    stored = StoredTensor((f"{projection.name}.scales",), FLOATS, (shape,), axes=Axes(1, 0))
    return converted(projection.out_features, lambda loaded: checked_scales(loaded, dtype).t(), stored, unit=(1, 1))


_SOURCES = {
    Packing.COMPRESSED_TENSORS: _CompressedTensorsSources,
    Packing.AWQ: _AwqSources,
    Packing.GPTQ: _GptqSources,
    Packing.GPTQ_V2: _GptqSources,
}
