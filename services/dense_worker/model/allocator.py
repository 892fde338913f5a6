"""`WeightAllocator`: creates a model's parts with uninitialised tensors, and chooses the format of linear layers."""

from __future__ import annotations

import torch

from services.common.errors import ModelError
from services.common.quantization.schemes import QuantizationConfig, Scheme
from services.dense_worker.model.linear import Cut, Linear, Projection, WeightFormat
from services.dense_worker.model.norm import RmsNorm
from services.dense_worker.model.parameters import Parameter, Source
from services.dense_worker.model.plain_weight import PlainWeight
from services.dense_worker.model.quantized.create import create_quantized
from services.dense_worker.model.quantized.layer import QuantizedLayer


class WeightAllocator:
    """Uninitialised tensors of one dtype on one device; on the meta device they take no memory."""

    def __init__(
        self, dtype: torch.dtype, device: torch.device, quantization: QuantizationConfig | None = None
    ) -> None:
        self.dtype, self.device, self._quantization = dtype, device, quantization

    def parameter(
        self, name: str, *shape: int, sources: tuple[Source, ...] = (), dtype: torch.dtype | None = None
    ) -> Parameter:
        """One tensor, of the model's dtype unless a format needs another."""
        return Parameter(name, torch.empty(shape, dtype=dtype or self.dtype, device=self.device), sources)

    def norm(self, name: str, checkpoint_name: str, size: int, eps: float) -> RmsNorm:
        """A norm. `checkpoint_name` is the name of the checkpoint's module, without ".weight"."""
        return RmsNorm(self.parameter(name, size, sources=(Source(f"{checkpoint_name}.weight", size),)), eps)

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

    def weight(self, name: str, in_features: int, merged_from: tuple[Projection, ...]) -> WeightFormat:
        """The weight of a linear layer. Its tensors are named `name`, or begin with it.

        Raises ModelError if the checkpoint stores its projections in different ways, or in shapes that their format
        does not allow.
        """
        scheme = self._scheme(merged_from)
        if scheme is not None:
            return create_quantized(scheme, QuantizedLayer(name, in_features, merged_from, self.parameter, self.dtype))
        sources = checkpoint_sources(merged_from, "weight")
        return PlainWeight(self.parameter(name, sum_of_sizes(merged_from), in_features, sources=sources))

    def _scheme(self, merged_from: tuple[Projection, ...]) -> Scheme | None:
        """How the projections are quantized, which must be the same for all; None: not at all."""
        if self._quantization is None:
            return None
        schemes = [self._quantization.scheme_of(projection.name) for projection in merged_from]
        if any(scheme != schemes[0] for scheme in schemes):
            found = ", ".join(f"{each.name}: {scheme}" for each, scheme in zip(merged_from, schemes, strict=True))
            raise ModelError(
                f"{self._quantization.method} quantizes projections in different ways that are computed as one: {found}"
            )
        return schemes[0]


def checkpoint_sources(merged_from: tuple[Projection, ...], kind: str) -> tuple[Source, ...]:
    """The tensors of a checkpoint that are merged into one; `kind` is "weight", "bias", ..."""
    return tuple(Source(f"{each.name}.{kind}", each.out_features) for each in merged_from)


def sum_of_sizes(merged_from: tuple[Projection, ...]) -> int:
    """The out_features of all projections together."""
    return sum(projection.out_features for projection in merged_from)
