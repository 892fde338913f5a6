"""Layers with a gate: a product with the token that multiplies what comes back from the attention worker.

Attention's output is multiplied by the gate's sigmoid. The output of a gated delta recurrence (arXiv:2412.06464) is
normalised by head and multiplied by the gate's SiLU. One merged product gives the row for the attention worker and then
the gate, which `Operations` keeps for the half of the layer that follows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional as F

from services.channel import rows_of_layer
from services.dense_worker.kernels.linear.linear import Linear
from services.dense_worker.kernels.norm.norm import HeadNorms, Norm, RmsNorm
from services.dense_worker.model.layer import AfterAttention, GatedHalf
from services.dense_worker.model.operations import Operations, Residual


@dataclass(frozen=True, slots=True)
class GatedRows:
    """The half of a layer before attention, or before a recurrence."""

    norm: Norm
    projection: Linear  # rows for the attention worker, then those of the gate
    gate_size: int
    head_norms: HeadNorms | None  # None: the rows are for a recurrence

    def forward(
        self, operations: Operations, residual: Residual, qkv_out: torch.Tensor | None
    ) -> tuple[torch.Tensor, Residual]:
        """residual [n, hidden] -> rows [n, out_features - gate_size], in `qkv_out` where given, and the residual."""
        residual, both = operations.norm_linear(residual, self.norm, self.projection)
        width = self.projection.out_features - self.gate_size
        rows, gate = both.split([width, self.gate_size], dim=1)
        operations.keep_gate(gate)
        own = torch.empty_like(rows) if qkv_out is None else rows_of_layer(qkv_out, width)
        own.copy_(rows)
        if self.head_norms is not None:
            own = operations.norm_heads(own, self.head_norms, is_in_place=True)
        return own, residual


@dataclass(frozen=True, slots=True)
class GatedInput:
    """The half of a layer before a short convolution: of three products with the token, the first times the third.

    The second is the gate of the convolution's output.
    """

    norm: Norm
    projection: Linear

    def forward(
        self, operations: Operations, residual: Residual, qkv_out: torch.Tensor | None
    ) -> tuple[torch.Tensor, Residual]:
        """residual [n, hidden] -> rows [n, out_features / 3], in `qkv_out` where given, and the residual."""
        residual, products = operations.norm_linear(residual, self.norm, self.projection)
        factor, gate, x = products.chunk(3, dim=1)
        operations.keep_gate(gate)
        own = torch.empty_like(x) if qkv_out is None else rows_of_layer(qkv_out, x.shape[1])
        return torch.mul(factor, x, out=own), residual


@dataclass(frozen=True, slots=True)
class ShortConvolutionOutput(GatedHalf):
    """After a short convolution: the gate times its output."""

    after: AfterAttention

    def gate(self, operations: Operations, attn_out: torch.Tensor) -> torch.Tensor:
        return operations.kept_gate() * attn_out


@dataclass(frozen=True, slots=True)
class StateSpaceOutput(GatedHalf):
    """After Mamba 2's recurrence: the norm of its output times SiLU(gate).

    Each of `num_groups` parts of a row is normalised by its own RMS, in float32.
    """

    norm: RmsNorm  # [value_size]
    num_groups: int
    after: AfterAttention

    def gate(self, operations: Operations, attn_out: torch.Tensor) -> torch.Tensor:
        groups = (attn_out.float() * F.silu(operations.kept_gate().float())).unflatten(1, (self.num_groups, -1))
        normed = groups * torch.rsqrt(groups.square().mean(dim=-1, keepdim=True) + self.norm.eps)
        return self.norm.weight.data * normed.flatten(1).to(attn_out.dtype)


@dataclass(frozen=True, slots=True)
class GatedAttention(GatedHalf):
    """After attention: sigmoid(gate) times its output."""

    after: AfterAttention

    def gate(self, operations: Operations, attn_out: torch.Tensor) -> torch.Tensor:
        return operations.apply_gate(attn_out)


@dataclass(frozen=True, slots=True)
class GatedDeltaOutput(GatedHalf):
    """After a recurrence: SiLU(gate) times the norm of each value head."""

    norm: RmsNorm  # [value_dim]
    after: AfterAttention

    def gate(self, operations: Operations, attn_out: torch.Tensor) -> torch.Tensor:
        return operations.apply_gate(attn_out, self.norm)
