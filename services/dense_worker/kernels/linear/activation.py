"""The activations of MLPs and of experts, in torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch.nn import functional as F

from services.common.families.shape import Activation, ClampedSwiglu

ACTIVATIONS: dict[Activation, Callable[[torch.Tensor], torch.Tensor]] = {
    Activation.SILU: F.silu,
    Activation.GELU: F.gelu,
    Activation.GELU_TANH: partial(F.gelu, approximate="tanh"),
    Activation.RELU: F.relu,
    Activation.RELU_SQUARED: lambda x: F.relu(x).square(),
    Activation.QUICK_GELU: lambda x: x * torch.sigmoid(1.702 * x),
}


@dataclass(frozen=True, slots=True)
class MlpActivation:
    """What is between the projections of an MLP."""

    function: Activation
    is_gated: bool  # the function of the first half of the columns, the gate, times the second half, up

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        """x [n, size], if gated [n, 2 * size] -> [n, size]."""
        function = ACTIVATIONS[self.function]
        if not self.is_gated:
            return function(x)
        gate, up = x.split(x.shape[1] // 2, dim=1)
        return function(gate) * up


def clamped_swiglu(gate: torch.Tensor, up: torch.Tensor, options: ClampedSwiglu) -> torch.Tensor:
    """The activation of gpt-oss, for tensors of one shape; see `ClampedSwiglu`."""
    gate, up = gate.clamp(max=options.limit), up.clamp(-options.limit, options.limit)
    return (up + 1) * (gate * torch.sigmoid(gate * options.alpha))
