"""A mixture of experts: a router chooses a few of a layer's MLPs for each token, and adds what they give."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional as F

from services.dense_worker.model.experts.router import Router
from services.dense_worker.model.mlp import GatedMlp
from services.dense_worker.model.norm import Norm
from services.dense_worker.model.operations import Operations, Residual
from services.dense_worker.model.parameters import Parameter


@dataclass(frozen=True, slots=True)
class SharedExpert:
    """An expert that all tokens use: sigmoid(gate(x)) * mlp(x), or mlp(x)."""

    mlp: GatedMlp
    gate: Parameter | None  # [1, hidden]

    def forward(self, operations: Operations, x: torch.Tensor) -> torch.Tensor:
        """x [n, hidden] -> [n, hidden] in float32."""
        result = _run(operations, self.mlp, x).float()
        return result if self.gate is None else F.linear(x, self.gate.data).sigmoid() * result


@dataclass(frozen=True, slots=True)
class ExpertMlp:
    """The weighted sum of the chosen experts. Each expert has its own linear layers, in any weight format.

    The host reads how many tokens each expert has got, so that experts without tokens cost nothing. That is the way for
    a CPU: a CUDA graph cannot wait for the host.
    """

    norm: Norm | None  # None: the experts read the residual itself
    router: Router
    experts: tuple[GatedMlp, ...]  # without norms
    shared: SharedExpert | None

    def activate(self, operations: Operations, residual: Residual) -> tuple[Residual, torch.Tensor]:
        """Returns the residual, and the sum, [n, hidden] in its dtype. It is added up in float32 and rounded once."""
        hidden = operations.settle(residual)
        x = hidden if self.norm is None else self.norm.normalize(hidden)
        chosen, weights = self.router.choose(x)
        total = torch.zeros_like(x, dtype=torch.float32)
        order = chosen.flatten().argsort(stable=True)  # of the pairs of token and expert, by expert
        counts = torch.bincount(chosen.flatten(), minlength=len(self.experts)).tolist()
        rows = (order // self.router.num_per_token).split(counts)
        parts = weights.flatten()[order].split(counts)
        for expert, its_rows, its_weights in zip(self.experts, rows, parts, strict=True):
            if len(its_rows):
                result = _run(operations, expert, x[its_rows])
                total.index_add_(0, its_rows, result * its_weights[:, None])
        if self.shared is not None:
            total += self.shared.forward(operations, x)
        return Residual(hidden), total.to(x.dtype)

    def add(
        self,
        operations: Operations,
        residual: Residual,
        activation: torch.Tensor,
        norm: Norm | None = None,
        multiplier: float = 1.0,
    ) -> Residual:
        """Adds the sum to the residual, normalised if there is a norm, times multiplier."""
        change = activation if norm is None else norm.normalize(activation)
        return Residual(operations.settle(residual) + (change if multiplier == 1.0 else change * multiplier))


def _run(operations: Operations, mlp: GatedMlp, x: torch.Tensor) -> torch.Tensor:
    """x [n, hidden], normalised -> the MLP's output, [n, hidden]."""
    _, activation = mlp.activate(operations, Residual(x))
    return operations.norm_linear(Residual(activation), None, mlp.down)[1]
