"""Gemma 1 to 3: (1 + weight) norms, a scaled embedding, GeGLU; later soft caps, more norms, windows and two ropes."""

from __future__ import annotations

from dataclasses import replace

from services.common.families.base import read_base, read_head_dim, read_window, windows_of_layers
from services.common.families.fields import ConfigFields
from services.common.families.rope import read_ropes_by_type
from services.common.families.shape import AttentionOptions, ModelConfig, NormKind, RopeConfig


def read_gemma(fields: ConfigFields, activation: str = "hidden_act", rope: RopeConfig | None = None) -> ModelConfig:
    """Gemma 1, and what all have in common."""
    fields.only("use_bidirectional_attention", False)
    config = read_base(fields, activation=activation, rope=rope)
    has_bias = fields.flag("attention_bias")
    multiplier = config.hidden_size**0.5
    parts = replace(
        config.parts,
        norm=NormKind.RMS_PLUS_ONE,
        embedding_multiplier=multiplier,
        is_multiplier_of_table=True,
    )
    return replace(config, qkv_bias=has_bias, o_bias=has_bias, parts=parts)


def read_gemma2(fields: ConfigFields, rope: RopeConfig | None = None) -> ModelConfig:
    """Gemma 2: soft caps of scores and logits, norms before and after, windows in every other layer."""
    config = read_gemma(fields, "hidden_activation", rope)
    softcap = fields.number("final_logit_softcapping")
    attention = AttentionOptions(
        scale=fields.number("query_pre_attn_scalar") ** -0.5, softcap=fields.number("attn_logit_softcapping")
    )
    windows = windows_of_layers(fields, read_window(fields))
    parts = replace(config.parts, has_norms_after=True, logit_softcap=softcap)
    return replace(config, parts=parts, attention=attention, sliding_windows=windows)


def read_gemma3(fields: ConfigFields) -> ModelConfig:
    """The text part of Gemma 3: norms of heads, and one rotary embedding for each kind of layer."""
    ropes = read_ropes_by_type(fields, dict.fromkeys(fields["layer_types"], read_head_dim(fields)))
    layer_ropes = tuple(ropes[kind] for kind in fields["layer_types"])
    config = read_gemma2(fields, ropes.get("full_attention", layer_ropes[0]))
    return replace(config, qk_norm=True, attention=replace(config.attention, layer_ropes=layer_ropes))
