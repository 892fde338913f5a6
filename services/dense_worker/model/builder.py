"""`Builder`: what the parts of a model are made with: its config, its names in checkpoints and its tensors."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from services.common.families.names import CheckpointNames
from services.common.families.shape import NormKind
from services.common.model_config import ModelConfig
from services.dense_worker.kernels.linear.linear import Cut, Linear, Projection
from services.dense_worker.kernels.norm.norm import Norm
from services.dense_worker.model.allocator import WeightAllocator
from services.dense_worker.parameters import Parameter, Source, StoredLayout


@dataclass(frozen=True, slots=True)
class Builder:
    """Of a model, or of one of its layers. `stored` is a name in the checkpoint, in a layer one of its modules'."""

    config: ModelConfig
    names: CheckpointNames
    allocator: WeightAllocator
    module: str = ""  # what the names of the layer begin with, such as "model.layers.0"; empty: it is of the model

    def of_layer(self, module: str) -> Builder:
        """The one of a layer."""
        return replace(self, module=module)

    def path(self, stored: str) -> str:
        """The whole name."""
        return f"{self.module}.{stored}" if self.module else stored

    def parameter(self, name: str, stored: str, *shape: int) -> Parameter:
        """A tensor that is here as it is in the checkpoint."""
        return self.allocator.parameter(name, *shape, sources=(Source(self.path(stored), shape[0]),))

    def norm(
        self,
        name: str,
        stored: str,
        size: int | tuple[int, int] | None = None,
        *,
        eps: float | None = None,
        kind: NormKind | None = None,
    ) -> Norm:
        """A norm; of the residual, and of the model's kind, unless something else is said."""
        config = self.config
        size, eps = size or config.hidden_size, config.norm_eps if eps is None else eps
        return self.allocator.norm(name, self.path(stored), size, eps, kind or config.parts.norm)

    def projection(self, stored: str, out_features: int, layout: StoredLayout | None = None) -> Projection:
        """A linear layer of the checkpoint."""
        return Projection(self.path(stored), out_features, layout)

    def linear(
        self, name: str, in_features: int, *merged_from: Projection, cut: Cut = Cut.OUT, has_bias: bool = False
    ) -> Linear:
        """A linear layer of one or several merged projections."""
        return self.allocator.linear(name, in_features, merged_from, cut, has_bias)

    def rounded(self, number: float) -> float:
        """A number in the model's dtype, as transformers rounds the multipliers of embeddings."""
        return torch.tensor(number, dtype=self.allocator.dtype).item()
