"""The MLP of a layer: norm, two or three projections, an activation between."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from services.dense_worker.model.linear import Linear
from services.dense_worker.model.norm import RmsNorm
from services.dense_worker.model.operations import Operations, Residual


@dataclass(frozen=True, slots=True)
class GatedMlp:
    """down(SiLU(gate(x)) * up(x)) of the normalised residual x (SwiGLU)."""

    norm: RmsNorm
    gate_up: Linear  # gate rows, then up rows
    down: Linear

    def activate(self, operations: Operations, residual: Residual) -> tuple[Residual, torch.Tensor]:
        """The residual, and what `down` is to multiply [n, intermediate]."""
        return operations.norm_swiglu(residual, self.norm, self.gate_up)
