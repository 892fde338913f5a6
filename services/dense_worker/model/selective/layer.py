"""Layers of Mamba 1 (arXiv:2312.00752): a convolution and a selective scan, between which there are products.

The convolution and the scan depend on the past and are the attention worker's. The time steps, B and C that the scan
needs are products with what the convolution gives, so tokens cross the seam twice: each layer of such a model counts as
two here, and the second begins where the first ends. The other way would be to send the matrices of these products to
the attention worker, 7 MB for each layer of a 2.8B model, which would multiply them without the tuned kernels.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional as F

from services.channel import rows_of_layer
from services.dense_worker.kernels.linear.linear import Linear
from services.dense_worker.kernels.norm.norm import RmsNorm, UnweightedRmsNorm
from services.dense_worker.model.layer import AfterAttention, GatedHalf
from services.dense_worker.model.operations import Operations, Residual


@dataclass(frozen=True, slots=True)
class ConvolutionOutput:
    """The half of a layer after the convolution: keeps its output beside the gate, for the scan's half of the layer."""

    attn_size: int

    def forward(self, operations: Operations, attn_out: torch.Tensor, residual: Residual) -> Residual:
        """attn_out [n, attn_size] -> the same residual."""
        operations.keep_gate(torch.cat((operations.kept_gate(), attn_out), dim=1))
        return residual


@dataclass(frozen=True, slots=True)
class ScanRows:
    """The half of a layer before the scan: makes its time steps, B and C of the convolution's output x.

    A row for the attention worker is x, B, C and the time steps, one for each channel.
    """

    mixed: Linear  # x -> what time steps are made of, then B, then C
    time_steps: Linear
    norms: tuple[RmsNorm | UnweightedRmsNorm, ...]  # of these three; empty: there are none
    norm: None = None

    def forward(
        self, operations: Operations, residual: Residual, qkv_out: torch.Tensor | None
    ) -> tuple[torch.Tensor, Residual]:
        """residual [n, hidden] -> rows [n, row_size], in `qkv_out` where given, and the same residual."""
        x = operations.kept_gate().chunk(2, dim=1)[1].contiguous()
        num_inputs = self.time_steps.in_features
        state_size = (self.mixed.out_features - num_inputs) // 2
        parts = operations.linear(self.mixed, x).split((num_inputs, state_size, state_size), dim=1)
        if self.norms:
            parts = tuple(norm.normalize(part) for norm, part in zip(self.norms, parts, strict=True))
        steps = operations.linear(self.time_steps, parts[0].contiguous())
        rows = torch.cat((x, *parts[1:], steps), dim=1)
        if qkv_out is None:
            return rows, residual
        return rows_of_layer(qkv_out, rows.shape[1]).copy_(rows), residual


@dataclass(frozen=True, slots=True)
class ScanOutput(GatedHalf):
    """After the scan: its output times SiLU of the gate."""

    after: AfterAttention

    def gate(self, operations: Operations, attn_out: torch.Tensor) -> torch.Tensor:
        return attn_out * F.silu(operations.kept_gate()[:, : self.attn_size])
