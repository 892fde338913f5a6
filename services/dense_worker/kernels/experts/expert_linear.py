"""`ExpertLinear`: the same linear layer of all experts of a layer, stacked in one weight."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

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
