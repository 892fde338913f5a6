"""The MLP of a layer: a norm, and two or three projections with an activation between them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional as F

from services.dense_worker.kernels.linear.activation import MlpActivation
from services.dense_worker.kernels.linear.linear import Linear
from services.dense_worker.kernels.norm.norm import Norm
from services.dense_worker.model.operations import MlpInput, Operations, Residual
from services.dense_worker.parameters import Parameter


class DownMlp:
    """An `Mlp` that ends with the product with `down`."""

    __slots__ = ()
    down: Linear

    def add(
        self,
        operations: Operations,
        residual: Residual,
        activation: MlpInput,
        norm: Norm | None = None,
        multiplier: float = 1.0,
    ) -> Residual:
        """Adds the product with `down` to the residual, normalised if there is a norm, times multiplier."""
        return operations.linear_add(residual, self.down, activation, norm, multiplier)


@dataclass(frozen=True, slots=True)
class ActivatedMlp(DownMlp):
    """down(activation(first(x))) of the normalised residual x. Gated with SiLU it is SwiGLU, with GELU GeGLU."""

    norm: Norm | None  # None: x is the residual itself
    first: Linear  # if gated gate rows, then up rows; otherwise up rows alone
    down: Linear
    activation: MlpActivation

    def activate(self, operations: Operations, residual: Residual) -> tuple[Residual, MlpInput]:
        """Returns the residual, and the input of `down`, [n, intermediate]."""
        return operations.norm_activate(residual, self.norm, self.first, self.activation)


@dataclass(frozen=True, slots=True)
class XieluMlp(DownMlp):
    """down(xielu(up(x))) of the normalised residual x. The activation (arXiv:2411.13010) has two learned numbers."""

    norm: Norm | None  # None: x is the residual itself
    up: Linear
    down: Linear
    # [4]: of which softplus multiplies the square of inputs above 0; of which softplus multiplies exp(x) - 1 - x of the
    # others, together with the third; the slope of all; the largest input of exp
    numbers: Parameter

    def activate(self, operations: Operations, residual: Residual) -> tuple[Residual, torch.Tensor]:
        """Returns the residual, and the input of `down`, [n, intermediate]."""
        residual, x = operations.norm_linear(residual, self.norm, self.up)
        positive, negative, slope, largest = self.numbers.data
        above, below = F.softplus(positive) * x * x, (slope + F.softplus(negative)) * (x.minimum(largest).expm1() - x)
        return residual, torch.where(x > 0, above, below) + slope * x
