"""The MLP of a layer: a norm, and two or three projections with an activation between them."""

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
        """Returns the residual, and the input of `down`, [n, intermediate]."""
        return operations.norm_swiglu(residual, self.norm, self.gate_up)
