"""A mixture of experts: a router chooses a few of a layer's MLPs for each token, and adds what they give."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional as F

from services.dense_worker.kernels.experts.routed_experts import RoutedExperts
from services.dense_worker.kernels.norm.norm import Norm
from services.dense_worker.model.mlp import ActivatedMlp
from services.dense_worker.model.operations import ActivatedExperts, Operations, Residual
from services.dense_worker.parameters import Parameter


@dataclass(frozen=True, slots=True)
class SharedExpert:
    """An expert that all tokens use: sigmoid(gate(x)) * mlp(x), or mlp(x)."""

    mlp: ActivatedMlp
    gate: Parameter | None  # [1, hidden]

    def forward(self, operations: Operations, x: torch.Tensor) -> torch.Tensor:
        """x [n, hidden] -> [n, hidden] in float32."""
        _, activation = self.mlp.activate(operations, Residual(x))
        result = operations.linear(self.mlp.down, activation).float()
        return result if self.gate is None else F.linear(x, self.gate.data).sigmoid() * result


@dataclass(frozen=True, slots=True)
class ExpertMlp:
    """The weighted sum of the chosen experts, and an expert for all tokens. Experts may have any weight format."""

    norm: Norm | None  # None: the experts read the residual itself
    routed: RoutedExperts
    shared: SharedExpert | None

    def activate(
        self, operations: Operations, residual: Residual
    ) -> tuple[Residual, torch.Tensor | ActivatedExperts]:
        """Returns the residual, and what `add` takes: of the sum, [n, hidden], added up in float32 and rounded once."""
        if self.shared is None:
            return operations.activate_experts(residual, self.norm, self.routed)
        residual, x = operations.normalize(residual, self.norm)
        return residual, operations.mix_experts(x, self.routed, self.shared.forward(operations, x))

    def add(
        self,
        operations: Operations,
        residual: Residual,
        activation: torch.Tensor | ActivatedExperts,
        norm: Norm | None = None,
        multiplier: float = 1.0,
    ) -> Residual:
        """Adds the sum to the residual, normalised if there is a norm, times multiplier."""
        return operations.add_experts(residual, activation, norm, multiplier)


@dataclass(frozen=True, slots=True)
class MlpBesideExperts:
    """An MLP and a mixture of experts, both of the residual, each between norms of its own: the sum of the two."""

    mlp: ActivatedMlp
    norm_after_mlp: Norm
    experts: ExpertMlp
    norm_after_experts: Norm

    def activate(self, operations: Operations, residual: Residual) -> tuple[Residual, torch.Tensor]:
        """Returns the residual, and the sum, [n, hidden]."""
        residual, activation = self.mlp.activate(operations, residual)
        of_mlp = operations.linear(self.mlp.down, activation)
        residual, x = operations.normalize(residual, self.experts.norm)
        of_experts = operations.mix_experts(x, self.experts.routed, None, routed_by=residual.hidden)
        _, normed = operations.normalize(Residual(of_mlp), self.norm_after_mlp)
        return residual, operations.settle(operations.add(Residual(normed), of_experts, self.norm_after_experts))

    def add(
        self,
        operations: Operations,
        residual: Residual,
        activation: torch.Tensor,
        norm: Norm | None = None,
        multiplier: float = 1.0,
    ) -> Residual:
        """Adds the sum to the residual, normalised if there is a norm, times multiplier."""
        return operations.add(residual, activation, norm, multiplier)
