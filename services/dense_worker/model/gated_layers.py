"""Layers with a gate: a product with the token that multiplies what comes back from the attention worker.

Attention's output is multiplied by the gate's sigmoid. The output of a gated delta recurrence (arXiv:2412.06464) is
normalised by head and multiplied by the gate's SiLU. One merged product gives the row for the attention worker and then
the gate, which `Operations` keeps for the half of the layer that follows.

Layers of Mamba 1 (arXiv:2312.00752) are a convolution and a selective scan, between which there are products. The time
steps, B and C that the scan needs are products with what the convolution gives, so tokens cross the seam twice: each
layer of such a model counts as two here, and the second begins where the first ends. The other way would be to send the
matrices of these products to the attention worker, 7 MB for each layer of a 2.8B model, which would multiply them
without the tuned kernels.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional as F

from services.channel import rows_of_layer
from services.common.families.shape import (
    GatedDelta,
    LayerHeads,
    NormKind,
    SelectiveScan,
    ShortConvolution,
    StateSpace,
)
from services.dense_worker.kernels.linear.linear import Linear, Projection
from services.dense_worker.kernels.norm.norm import HeadNorms, Norm, RmsNorm, UnweightedRmsNorm
from services.dense_worker.model.builder import Builder
from services.dense_worker.model.layer import AfterAttention, DecoderLayer, GatedHalf
from services.dense_worker.model.operations import Operations, Residual
from services.dense_worker.model.stored_layout import PartsByHead


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


def build_gated_rows(
    layer: Builder, heads: LayerHeads, head_norms: HeadNorms | None
) -> GatedRows | GatedInput | ScanRows:
    """The half of a layer before attention, or before a recurrence, which has no norms of q and k."""
    config, sizes = layer.config, heads.recurrence
    if isinstance(sizes, SelectiveScan):
        return build_scan_rows(layer, sizes)
    norm = layer.norm("input_norm", layer.names.attention_norm)
    match sizes:
        case None:
            merged, has_bias = _attention_projections(layer, heads), config.qkv_bias
        case GatedDelta():
            merged, has_bias = _recurrence_projections(layer, sizes), False
        case StateSpace():
            merged, has_bias = _state_space_projections(layer, sizes), config.parts.mixer_bias
        case ShortConvolution():
            mixed = layer.projection(layer.names.of_short_convolution.mixed, 3 * sizes.conv_dim)
            return GatedInput(norm, layer.linear("qkv", config.hidden_size, mixed, has_bias=config.parts.mixer_bias))
    projection = layer.linear("qkv", config.hidden_size, *merged, has_bias=has_bias)
    return GatedRows(norm, projection, heads.attn_size, head_norms)


def build_gated_output(layer: Builder, heads: LayerHeads, after: AfterAttention) -> AfterAttention:
    """The half of a layer after attention, or after a recurrence; `after` begins with the output projection."""
    names, sizes = layer.names, heads.recurrence
    match sizes:
        case None:
            return GatedAttention(after)
        case ShortConvolution():
            return ShortConvolutionOutput(after)
        case SelectiveScan():
            return ScanOutput(after)
        case GatedDelta():
            name, size = names.of_gated_delta.norm, sizes.value_dim
        case StateSpace():
            name, size = names.of_state_space.norm, sizes.value_size
    norm = layer.norm("recurrence_norm", name, size, kind=NormKind.RMS)
    assert isinstance(norm, RmsNorm)
    if isinstance(sizes, GatedDelta):
        return GatedDeltaOutput(norm, after)
    return StateSpaceOutput(norm, sizes.num_groups, after)


def build_convolution_stroke(layer: Builder, sizes: ShortConvolution) -> DecoderLayer:
    """The part of a layer around its convolution. Rows of its input come first, then those of the gate."""
    config, names, size = layer.config, layer.names, sizes.conv_dim
    norm = layer.norm("input_norm", names.attention_norm)
    mixed = layer.projection(names.of_short_convolution.mixed, 2 * size)
    projection = layer.linear("qkv", config.hidden_size, mixed, has_bias=config.parts.mixer_bias)
    return DecoderLayer(GatedRows(norm, projection, size, None), ConvolutionOutput(size))


def build_scan_rows(layer: Builder, sizes: SelectiveScan) -> ScanRows:
    """The half of a layer between its convolution and its scan."""
    page, rank, state_size = layer.names.of_selective_scan, sizes.time_step_rank, sizes.state_size
    mixed = layer.projection(page.mixed, rank + 2 * state_size)
    steps = layer.projection(page.time_steps, sizes.num_channels)
    norms: tuple[RmsNorm | UnweightedRmsNorm, ...] = ()
    if page.norms:
        of_norms = zip(("time_step_norm", "b_norm", "c_norm"), page.norms, (rank, state_size, state_size), strict=True)
        norms = tuple(layer.norm(*each, kind=NormKind.RMS) for each in of_norms)
    elif sizes.norm_eps is not None:
        norms = (UnweightedRmsNorm(sizes.norm_eps),) * 3
    return ScanRows(
        layer.linear("scan_mixed", sizes.num_channels, mixed),
        layer.linear("scan_time_steps", rank, steps, has_bias=True),
        norms,
    )


def _attention_projections(layer: Builder, heads: LayerHeads) -> tuple[Projection, ...]:
    """q, k, v, and the gate, whose rows follow those of q in each head of the checkpoint's matrix of q."""
    q, k, v = layer.names.qkv

    def of_q(part: int) -> Projection:
        return layer.projection(q, heads.q_size, PartsByHead(heads.num_heads, (heads.head_dim,) * 2, (part,)))

    return of_q(0), layer.projection(k, heads.kv_size), layer.projection(v, heads.kv_size), of_q(1)


def _recurrence_projections(layer: Builder, sizes: GatedDelta) -> tuple[Projection, ...]:
    """q, k and v, then b, a, and the gate z."""
    names, num_heads, num_key_heads = layer.names.of_gated_delta, sizes.num_value_heads, sizes.num_key_heads
    if not names.qkvz:
        return (
            layer.projection(names.qkv, sizes.conv_dim),
            layer.projection(names.b, num_heads),
            layer.projection(names.a, num_heads),
            layer.projection(names.z, sizes.value_size),
        )
    per_key_head = num_heads // num_key_heads
    values = per_key_head * sizes.value_dim
    in_head = (sizes.key_dim, sizes.key_dim, values, values)
    return (
        layer.projection(names.qkvz, sizes.conv_dim, PartsByHead(num_key_heads, in_head, (0, 1, 2))),
        layer.projection(names.ba, 2 * num_heads, PartsByHead(num_key_heads, (per_key_head,) * 2, (0, 1))),
        layer.projection(names.qkvz, sizes.value_size, PartsByHead(num_key_heads, in_head, (3,))),
    )


def _state_space_projections(layer: Builder, sizes: StateSpace) -> tuple[Projection, ...]:
    """x, B and C, then the time steps, and the gate, whose rows come first in the checkpoint's matrix."""
    parts = (sizes.value_size, sizes.row_size)

    def of_mixed(part: int) -> Projection:
        return layer.projection(layer.names.of_state_space.mixed, parts[part], PartsByHead(1, parts, (part,)))

    return of_mixed(1), of_mixed(0)
