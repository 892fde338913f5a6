"""Builds the parts of layers with a gate: attention whose output is gated, and recurrent layers."""

from __future__ import annotations

from services.common.families.shape import (
    GatedDelta,
    LayerHeads,
    NormKind,
    SelectiveScan,
    ShortConvolution,
    StateSpace,
)
from services.dense_worker.kernels.linear.linear import Projection
from services.dense_worker.kernels.norm.norm import HeadNorms, RmsNorm
from services.dense_worker.model.builder import Builder
from services.dense_worker.model.gated.layer import (
    GatedAttention,
    GatedDeltaOutput,
    GatedInput,
    GatedRows,
    ShortConvolutionOutput,
    StateSpaceOutput,
)
from services.dense_worker.model.layer import AfterAttention
from services.dense_worker.model.selective.build import build_scan_rows
from services.dense_worker.model.selective.layer import ScanOutput, ScanRows
from services.dense_worker.model.stored_layout import PartsByHead


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
