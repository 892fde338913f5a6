"""`RoutedExperts`: a router and the experts it chooses from; an operation of `Operations` runs them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from services.common.families.shape import Activation, ClampedSwiglu
from services.dense_worker.kernels.experts.router import Router
from services.dense_worker.kernels.linear.activation import ACTIVATIONS, clamped_swiglu
from services.dense_worker.kernels.linear.linear import WeightFormat
from services.dense_worker.parameters import Parameter


@dataclass(frozen=True)  # without slots, for `_shares`
class ExpertLinear:
    """y = W[e] x + b[e] for expert e. The rows of expert 0 come first, then those of expert 1, and so on.

    As all experts have equal shapes, W is also [num_experts, out_features, in_features], and so is each tensor of a
    format, with its own number of rows and columns.
    """

    name: str  # "experts_gate_up" or "experts_down"
    num_experts: int
    in_features: int
    out_features: int  # of one expert
    weight: WeightFormat  # of the matrix [num_experts * out_features, in_features]
    bias: Parameter | None  # [num_experts * out_features]

    @property
    def bias_data(self) -> torch.Tensor | None:
        """The bias as a tensor; None if there is none."""
        return None if self.bias is None else self.bias.data

    def multiply(self, expert: int, x: torch.Tensor) -> torch.Tensor:
        """x [n, in_features] -> the product with one expert's matrix, [n, out_features]: the reference, in torch."""
        weight, bias = self._shares[expert]
        return weight.multiply(x, bias)

    @cached_property
    def _shares(self) -> tuple[tuple[WeightFormat, torch.Tensor | None], ...]:
        """The weight and the bias of each expert: views."""
        count = self.num_experts
        weights = (self.weight.share(i, count) for i in range(count))
        biases = (None,) * count if self.bias is None else self.bias.data.view(count, -1).unbind()
        return tuple(zip(weights, biases, strict=True))


@dataclass(frozen=True, slots=True)
class RoutedExperts:
    """The sum of weight * down(activation(gate(x)) * up(x)) over the experts that the router has chosen for x."""

    router: Router
    gate_up: ExpertLinear  # of each expert: gate rows, then up rows
    down: ExpertLinear
    activation: Activation
    clamped: ClampedSwiglu | None = None  # instead of `activation`
    loads: torch.Tensor | None = None  # int64 [num_experts]: steps count each expert's tokens here; None: nowhere

    def mix(self, x: torch.Tensor, routed_by: torch.Tensor | None = None) -> torch.Tensor:
        """x [n, hidden] -> the sum, [n, hidden] in float32: the reference for kernels, in torch.

        The router reads `routed_by` [n, hidden], or x.

        The host reads how many tokens each expert has got, so that experts without tokens cost nothing. That is the way
        for a CPU: a CUDA graph cannot wait for the host.
        """
        chosen, weights = self.router.choose(x if routed_by is None else routed_by)
        total = torch.zeros_like(x, dtype=torch.float32)
        order = chosen.flatten().argsort(stable=True)  # of the pairs of token and expert, by expert
        loads = torch.bincount(chosen.flatten(), minlength=self.gate_up.num_experts)
        if self.loads is not None:
            self.loads.add_(loads)
        counts = loads.tolist()
        rows = (order // self.router.num_per_token).split(counts)
        parts = weights.flatten()[order].split(counts)
        for expert, (its_rows, its_weights) in enumerate(zip(rows, parts, strict=True)):
            if len(its_rows):
                activation = self.activate(self.gate_up.multiply(expert, x[its_rows]))
                total.index_add_(0, its_rows, self.down.multiply(expert, activation) * its_weights[:, None])
        return total

    def activate(self, gate_up: torch.Tensor) -> torch.Tensor:
        """gate_up [n, 2 * intermediate] -> the input of `down`, [n, intermediate]."""
        gate, up = gate_up.chunk(2, dim=1)
        if self.clamped is not None:
            return clamped_swiglu(gate, up, self.clamped)
        return ACTIVATIONS[self.activation](gate) * up
