"""Builds the parts of layers with a gate: attention whose output is gated, and recurrent layers."""

from __future__ import annotations

from services.common.families.names import CheckpointNames, GatedDeltaNames, StateSpaceNames
from services.common.families.shape import (
    GatedDelta,
    LayerHeads,
    NormKind,
    SelectiveScan,
    ShortConvolution,
    StateSpace,
)
from services.common.model_config import ModelConfig
from services.dense_worker.kernels.linear.linear import Cut, Projection
from services.dense_worker.kernels.norm.norm import HeadNorms, RmsNorm
from services.dense_worker.model.allocator import WeightAllocator
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
    config: ModelConfig,
    allocator: WeightAllocator,
    names: CheckpointNames,
    layer: str,
    heads: LayerHeads,
    head_norms: HeadNorms | None,
) -> GatedRows | GatedInput | ScanRows:
    """The half of a layer before attention, or before a recurrence, which has no norms of q and k."""
    sizes = heads.recurrence
    if isinstance(sizes, SelectiveScan):
        return build_scan_rows(config, allocator, names, layer, sizes)
    norm_name = f"{layer}.{names.attention_norm}"
    norm = allocator.norm("input_norm", norm_name, config.hidden_size, config.norm_eps, config.parts.norm)
    match sizes:
        case None:
            merged, has_bias = _attention_projections(names, layer, heads), config.qkv_bias
        case GatedDelta():
            merged, has_bias = _recurrence_projections(names.of_gated_delta, layer, sizes), False
        case StateSpace():
            merged, has_bias = _state_space_projections(names.of_state_space, layer, sizes), config.parts.mixer_bias
        case ShortConvolution():
            mixed = (Projection(f"{layer}.{names.of_short_convolution.mixed}", 3 * sizes.conv_dim),)
            return GatedInput(
                norm, allocator.linear("qkv", config.hidden_size, mixed, Cut.OUT, config.parts.mixer_bias)
            )
    projection = allocator.linear("qkv", config.hidden_size, merged, Cut.OUT, has_bias)
    return GatedRows(norm, projection, heads.attn_size, head_norms)


def build_gated_output(
    config: ModelConfig,
    allocator: WeightAllocator,
    names: CheckpointNames,
    layer: str,
    heads: LayerHeads,
    after: AfterAttention,
) -> AfterAttention:
    """The half of a layer after attention, or after a recurrence; `after` begins with the output projection."""
    sizes = heads.recurrence
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
    norm = allocator.norm("recurrence_norm", f"{layer}.{name}", size, config.norm_eps, NormKind.RMS)
    assert isinstance(norm, RmsNorm)
    if isinstance(sizes, GatedDelta):
        return GatedDeltaOutput(norm, after)
    return StateSpaceOutput(norm, sizes.num_groups, after)


def _attention_projections(names: CheckpointNames, layer: str, heads: LayerHeads) -> tuple[Projection, ...]:
    """q, k, v, and the gate, whose rows follow those of q in each head of the checkpoint's matrix of q."""
    q, k, v = (f"{layer}.{name}" for name in names.qkv)

    def of_q(part: int) -> Projection:
        return Projection(q, heads.q_size, PartsByHead(heads.num_heads, (heads.head_dim,) * 2, (part,)))

    return of_q(0), Projection(k, heads.kv_size), Projection(v, heads.kv_size), of_q(1)


def _recurrence_projections(names: GatedDeltaNames, layer: str, sizes: GatedDelta) -> tuple[Projection, ...]:
    """q, k and v, then b, a, and the gate z."""
    num_heads, num_key_heads = sizes.num_value_heads, sizes.num_key_heads
    if not names.qkvz:
        return (
            Projection(f"{layer}.{names.qkv}", sizes.conv_dim),
            Projection(f"{layer}.{names.b}", num_heads),
            Projection(f"{layer}.{names.a}", num_heads),
            Projection(f"{layer}.{names.z}", sizes.value_size),
        )
    per_key_head = num_heads // num_key_heads
    values = per_key_head * sizes.value_dim
    in_head = (sizes.key_dim, sizes.key_dim, values, values)
    return (
        Projection(f"{layer}.{names.qkvz}", sizes.conv_dim, PartsByHead(num_key_heads, in_head, (0, 1, 2))),
        Projection(f"{layer}.{names.ba}", 2 * num_heads, PartsByHead(num_key_heads, (per_key_head,) * 2, (0, 1))),
        Projection(f"{layer}.{names.qkvz}", sizes.value_size, PartsByHead(num_key_heads, in_head, (3,))),
    )


def _state_space_projections(names: StateSpaceNames, layer: str, sizes: StateSpace) -> tuple[Projection, ...]:
    """x, B and C, then the time steps, and the gate, whose rows come first in the checkpoint's matrix."""
    parts = (sizes.value_size, sizes.row_size)

    def of_mixed(part: int) -> Projection:
        return Projection(f"{layer}.{names.mixed}", parts[part], PartsByHead(1, parts, (part,)))

    return of_mixed(1), of_mixed(0)
