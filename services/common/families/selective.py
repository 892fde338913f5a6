"""Families with the recurrence of Mamba 1: Mamba, Falcon Mamba, and Jamba, some of whose layers have attention."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from services.common.families.base import read_base
from services.common.families.experts import with_experts_in
from services.common.families.fields import ConfigFields
from services.common.families.rope import no_rope
from services.common.families.shape import (
    AttentionOptions,
    LayerHeads,
    ModelConfig,
    SelectiveScan,
    ShortConvolution,
)

_NUM_POSITIONS = 2**20  # a state has no limit; this many tokens of a text are counted
_HEAD_DIM = 64  # of heads that no layer has


def translate_mamba(raw: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json with fields that other families have, which say nothing here."""
    positions = {"max_position_embeddings": _NUM_POSITIONS, "num_attention_heads": 1, "head_dim": _HEAD_DIM}
    return dict(raw) | positions


def read_mamba(fields: ConfigFields) -> ModelConfig:
    """Mamba 1: nothing but the recurrence. Texts may be as long as positions are counted."""
    return _read_mamba(fields, norm_eps=None)


def read_falcon_mamba(fields: ConfigFields) -> ModelConfig:
    """Falcon Mamba: norms without weights of what time steps are made of, of B and of C."""
    return _read_mamba(fields, norm_eps=fields.number("mixer_rms_eps", 1e-6))


def _read_mamba(fields: ConfigFields, norm_eps: float | None) -> ModelConfig:
    fields.only("hidden_act", "silu")
    fields.ignore("expand", "residual_in_fp32", "rescale_prenorm_residual", "use_mambapy", "use_associative_scan")
    fields.ignore("num_attention_heads", "head_dim", "use_falcon_mambapy")
    fields.ignore("time_step_scale", "time_step_min", "time_step_max", "time_step_init_scheme", "time_step_floor")
    fields.ignore("d_model", "d_inner", "n_layer", "ssm_cfg", "fused_add_norm", "rms_norm", "pad_vocab_size_multiple")
    size = fields.size("intermediate_size")
    config = read_base(
        fields,
        eps="layer_norm_epsilon",
        intermediate_size=size,
        num_kv_heads=1,
        head_dim=_HEAD_DIM,
        rope=no_rope(_HEAD_DIM, fields.size("max_position_embeddings")),
    )
    scan = SelectiveScan(size, fields.size("state_size"), fields.size("time_step_rank"), norm_eps)
    convolution = ShortConvolution(size, fields.size("conv_kernel"), fields.flag("use_conv_bias"), is_activated=True)
    config = _with_scans(fields, config, ["linear_attention"] * config.num_layers, convolution, scan)
    layers, has_bias = tuple(range(config.num_layers)), fields.flag("use_bias")
    parts = replace(config.parts, layers_without_mlp=layers, mixer_bias=has_bias)
    return replace(config, parts=parts)


def read_jamba(fields: ConfigFields) -> ModelConfig:
    """Jamba: attention without rotation in some layers, an MLP or experts in each."""
    fields.ignore("use_mamba_kernels", "use_mambapy", "use_associative_scan", "num_logits_to_keep")
    fields.ignore("attn_layer_period", "attn_layer_offset", "expert_layer_period", "expert_layer_offset")
    head_dim = fields.size("hidden_size") // fields.size("num_attention_heads")
    rope = no_rope(head_dim, fields.size("max_position_embeddings"))
    config = read_base(fields, head_dim=head_dim, rope=rope)
    size = fields.size("mamba_expand") * config.hidden_size
    scan = SelectiveScan(size, fields.size("mamba_d_state"), fields.size("mamba_dt_rank"))
    has_bias = fields.flag("mamba_conv_bias")
    convolution = ShortConvolution(size, fields.size("mamba_d_conv"), has_bias, is_activated=True)
    counts = fields["layers_num_experts"]
    config = _with_scans(fields, config, fields["layer_types"], convolution, scan)
    config = replace(config, parts=replace(config.parts, mixer_bias=fields.flag("mamba_proj_bias")))
    without = frozenset(config.parts.layers_without_mlp)
    blocks = [(layer, block) for layer, (block, _) in enumerate(config.parts.blocks) if layer not in without]
    layers = tuple(layer for layer, block in blocks if counts[block] > 1)
    return with_experts_in(fields, config, layers) if layers else config


def _with_scans(
    fields: ConfigFields,
    config: ModelConfig,
    kinds: Sequence[str],
    convolution: ShortConvolution,
    scan: SelectiveScan,
) -> ModelConfig:
    """The model with each layer of linear_attention as two, a convolution and a scan; the others have attention."""
    if convolution.conv_size < 2:
        raise fields.error("the convolution's size", convolution.conv_size, "expected at least 2")
    heads = LayerHeads(config.num_heads, config.num_kv_heads, config.head_dim)
    by_kind = {"full_attention": (None,), "linear_attention": (convolution, scan)}
    strokes = [(block, recurrence) for block, kind in enumerate(kinds) for recurrence in by_kind[kind]]
    parts = replace(
        config.parts,
        blocks=tuple((block, None if recurrence is convolution else block) for block, recurrence in strokes),
        layers_without_mlp=tuple(i for i, (_, recurrence) in enumerate(strokes) if recurrence is convolution),
    )
    attention = AttentionOptions(
        layer_ropes=(None,) * len(strokes),
        layer_heads=tuple(replace(heads, recurrence=recurrence) for _, recurrence in strokes),
    )
    return replace(
        config,
        num_layers=len(strokes),
        sliding_windows=(None,) * len(strokes),
        parts=parts,
        attention=attention,
    )
