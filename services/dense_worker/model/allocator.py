"""`WeightAllocator`: creates a model's parts with uninitialised tensors, and chooses the format of linear layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from services.common.errors import ModelError
from services.common.families.shape import NormKind
from services.common.quantization.schemes import (
    LM_HEAD,
    BlockFp8Scheme,
    GroupedIntScheme,
    Mxfp4Scheme,
    OnTheFlyFp8,
    QuantizationConfig,
    ScaledScheme,
    Scheme,
)
from services.dense_worker.kernels.experts.routed_experts import ExpertLinear
from services.dense_worker.kernels.linear.linear import (
    Cut,
    Linear,
    PlainWeight,
    Projection,
    QuantizedFormat,
    WeightFormat,
)
from services.dense_worker.kernels.linear.quantized.block_fp8_weight import create_block_fp8
from services.dense_worker.kernels.linear.quantized.layer import FLOATS, QuantizedLayer
from services.dense_worker.kernels.linear.quantized.mxfp4_weight import create_mxfp4
from services.dense_worker.kernels.linear.quantized.packed_sources import create_grouped_int
from services.dense_worker.kernels.linear.quantized.scaled_weight import create_on_the_fly, create_scaled
from services.dense_worker.kernels.norm.norm import LayerNorm, Norm, RmsNorm, RmsNormPlusOne
from services.dense_worker.model.stored_layout import LessOne, StackedExperts
from services.dense_worker.model.weight_memory import Empty
from services.dense_worker.parameters import Conversion, Loaded, Parameter, Source, StoredLayout, StoredTensor


class WeightAllocator:
    """Uninitialised tensors of one dtype on one device; on the meta device they take no memory."""

    def __init__(
        self,
        dtype: torch.dtype,
        device: torch.device,
        quantization: QuantizationConfig | None = None,
        empty: Empty | None = None,
    ) -> None:
        """`empty` makes the tensors; None: each one in memory of its own."""
        self.dtype, self.device, self._quantization = dtype, device, quantization
        self._empty: Empty = empty or (lambda shape, dtype: torch.empty(shape, dtype=dtype, device=device))

    def parameter(
        self, name: str, *shape: int, sources: tuple[Source, ...] = (), dtype: torch.dtype | None = None
    ) -> Parameter:
        """One tensor, of the model's dtype unless a format needs another."""
        return Parameter(name, self._empty(shape, dtype or self.dtype), sources)

    def norm(
        self, name: str, checkpoint_name: str, size: int | tuple[int, int], eps: float, kind: NormKind = NormKind.RMS
    ) -> Norm:
        """A norm. `checkpoint_name` is the name of the checkpoint's module, without ".weight"."""
        shape = size if isinstance(size, tuple) else (size,)
        if kind is NormKind.LAYER_UNWEIGHTED:
            ones = Conversion((), lambda: torch.ones(shape, dtype=self.dtype))
            sources = (Source(f"{checkpoint_name}.weight", shape[0], ones),)
            return LayerNorm(self.parameter(name, *shape, sources=sources), None, eps)
        layout = LessOne() if kind is NormKind.LAYER_PLUS_ONE else None
        weight = self.parameter(name, *shape, sources=(_stored_source(f"{checkpoint_name}.weight", shape, layout),))
        if kind is NormKind.RMS:
            return RmsNorm(weight, eps)
        if kind is NormKind.RMS_PLUS_ONE:
            return RmsNormPlusOne(weight, eps)
        bias = None
        if kind is not NormKind.LAYER_NO_BIAS:
            bias = self.parameter(f"{name}_bias", *shape, sources=(Source(f"{checkpoint_name}.bias", shape[0]),))
        return LayerNorm(weight, bias, eps)

    def linear(
        self, name: str, in_features: int, merged_from: tuple[Projection, ...], cut: Cut, has_bias: bool
    ) -> Linear:
        """A linear layer of one or several merged projections: their out_features are added."""
        bias = None
        if has_bias:
            sources = checkpoint_sources(merged_from, "bias")
            bias = self.parameter(f"{name}_bias", sum_of_sizes(merged_from), sources=sources)
        weight = self.weight(f"{name}_weight", in_features, merged_from)
        return Linear(name, in_features, sum_of_sizes(merged_from), merged_from, cut, weight, bias)

    def attention_projections(
        self,
        name: str,
        in_features: int,
        merged_from: tuple[Projection, ...],
        *,
        has_bias: bool,
        has_key_bias: bool,
        key_index: int = 1,
    ) -> Linear:
        """The linear layer before attention; of its projections the one of keys may lack a bias, which is then 0."""
        linear = self.linear(name, in_features, merged_from, Cut.OUT, has_bias)
        if linear.bias is None or has_key_bias or len(merged_from) <= key_index:
            return linear
        sources = list(linear.bias.sources)
        sources[key_index] = optional_zeros(sources[key_index].name, sources[key_index].num_rows)
        return replace(linear, bias=replace(linear.bias, sources=tuple(sources)))

    def experts(
        self, name: str, num_experts: int, in_features: int, merged_from: tuple[Projection, ...], has_bias: bool
    ) -> ExpertLinear:
        """A linear layer of each expert. `merged_from` lists the projections of expert 0, then of expert 1, ..."""
        linear = self.linear(name, in_features, merged_from, Cut.OUT, has_bias)
        out_features = linear.out_features // num_experts
        return ExpertLinear(name, num_experts, in_features, out_features, linear.weight, linear.bias)

    def weight(self, name: str, in_features: int, merged_from: tuple[Projection, ...]) -> WeightFormat:
        """The weight of a linear layer. Its tensors are named `name`, or begin with it.

        Raises ModelError if the checkpoint stores its projections in different ways, or in shapes that their format
        does not allow.
        """
        scheme = self._scheme([LM_HEAD] if name == LM_HEAD else [each.name for each in merged_from], merged_from)
        if scheme is not None:
            return create_quantized(scheme, QuantizedLayer(name, in_features, merged_from, self.parameter, self.dtype))
        sources = checkpoint_sources(merged_from, "weight", in_features)
        return PlainWeight(self.parameter(name, sum_of_sizes(merged_from), in_features, sources=sources))

    def scheme_of(self, projection: Projection) -> Scheme | None:
        """How a checkpoint stores a layer that is not multiplied as it is; None: unquantized."""
        return self._scheme([projection.name], (projection,))

    def _scheme(self, names: Sequence[str], merged_from: tuple[Projection, ...]) -> Scheme | None:
        """How the projections are quantized, which must be the same for all; None: not at all."""
        if self._quantization is None:
            return None
        schemes = [self._quantization.scheme_of(name) for name in names]
        other = next((i for i, scheme in enumerate(schemes) if scheme != schemes[0]), None)
        if other is not None:
            found = f"{names[0]}: {schemes[0]}, {names[other]}: {schemes[other]}"
            raise ModelError(
                f"{self._quantization.method} quantizes projections in different ways that are computed as one: {found}"
            )
        is_stacked = isinstance(schemes[0], Mxfp4Scheme) and isinstance(merged_from[0].layout, StackedExperts)
        reordered = [each.name for each in merged_from if each.layout is not None]
        if reordered and schemes[0] is not None and not (is_stacked or isinstance(schemes[0], OnTheFlyFp8)):
            raise ModelError(f"{self._quantization.method} is not supported for {reordered[0]}, whose rows move")
        return schemes[0]


def create_quantized(scheme: Scheme, layer: QuantizedLayer) -> QuantizedFormat:
    """The weight of a linear layer in the format that its scheme says. A new format is a line here.

    Raises ModelError if the layer's shape does not fit the scheme.
    """
    match scheme:
        case ScaledScheme():
            return create_scaled(scheme, layer)
        case BlockFp8Scheme():
            return create_block_fp8(scheme, layer)
        case GroupedIntScheme():
            return create_grouped_int(scheme, layer)
        case Mxfp4Scheme():
            return create_mxfp4(scheme, layer)
        case OnTheFlyFp8():
            return create_on_the_fly(layer)


def optional_zeros(name: str, num_rows: int, *shapes: tuple[int, ...]) -> Source:
    """The source of a vector that a checkpoint may lack, and which is then 0. `shapes` that it may have there."""

    def convert(loaded: Loaded | None) -> torch.Tensor:
        return torch.zeros(num_rows) if loaded is None else loaded.tensor.flatten()

    stored = StoredTensor((name,), FLOATS, shapes or ((num_rows,),), is_optional=True)
    return Source(name, num_rows, Conversion((stored,), convert))


def checkpoint_sources(merged_from: tuple[Projection, ...], kind: str, *row_shape: int) -> tuple[Source, ...]:
    """The tensors of a checkpoint that are merged into one; `kind` is "weight", "bias", ...

    `row_shape` is the shape of a row here: the in_features of a weight.
    """
    return tuple(
        _stored_source(f"{each.name}.{kind}", (each.out_features, *row_shape), each.layout) for each in merged_from
    )


def sum_of_sizes(merged_from: tuple[Projection, ...]) -> int:
    """The out_features of all projections together."""
    return sum(projection.out_features for projection in merged_from)


def _stored_source(name: str, shape: tuple[int, ...], layout: StoredLayout | None) -> Source:
    """The source of an unquantized tensor that has `shape` here; `layout` None: in the checkpoint, too."""
    if layout is None:
        return Source(name, shape[0])

    def restore(loaded: Loaded) -> torch.Tensor:
        return layout.restore(loaded.tensor)

    axes = layout.axes(len(shape))
    stored = StoredTensor((name,), FLOATS, (layout.stored_shape(shape),), axes=axes)
    return Source(name, shape[0], Conversion((stored,), restore, axes.unit))
