"""Families without rotary embeddings: ALiBi (BLOOM, MPT) or learned positions (GPT-2, GPT-Neo, StarCoder 1, OPT).

All have LayerNorm.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from services.common.families.alibi import alibi_slopes, mpt_alibi_slopes
from services.common.families.base import read_base, read_head_dim
from services.common.families.fields import ConfigFields
from services.common.families.rope import no_rope
from services.common.families.shape import Activation, AttentionOptions, ModelConfig, NormKind, ResidualKind
from services.common.json_files.fields import Fields

_BLOOM_POSITIONS = 2048  # ALiBi has no limit; its models were trained on this many


def _read(
    fields: ConfigFields,
    *,
    eps: str | float,
    activation: str | Activation,
    intermediate_size: int,
    num_positions: int,
    has_bias: bool,
    num_kv_heads: int | None = None,
) -> ModelConfig:
    """A model with LayerNorm, an MLP without a gate, and no rotation. `num_kv_heads` None: as many as heads."""
    config = read_base(
        fields,
        eps=eps,
        activation=activation,
        intermediate_size=intermediate_size,
        num_kv_heads=num_kv_heads or fields.size("num_attention_heads"),
        num_positions=num_positions,
        rope=no_rope(read_head_dim(fields), num_positions),
    )
    return replace(
        config,
        parts=replace(config.parts, norm=NormKind.LAYER, is_gated=False),
        attention=AttentionOptions(layer_ropes=(None,) * config.num_layers),
        qkv_bias=has_bias,
        o_bias=has_bias,
        mlp_bias=has_bias,
    )


def read_bloom(fields: ConfigFields) -> ModelConfig:
    """BLOOM and BLOOMZ: ALiBi, and a norm of the embedding."""
    fields.only("apply_residual_connection_post_layernorm", False)
    num_positions = Fields({"seq_length": _BLOOM_POSITIONS, **fields.raw}, fields.where).size("seq_length")
    config = _read(
        fields,
        eps="layer_norm_epsilon",
        activation=Activation.GELU_TANH,
        intermediate_size=4 * fields.size("hidden_size"),
        num_positions=num_positions,
        has_bias=True,
    )
    attention = replace(config.attention, alibi_slopes=alibi_slopes(config.num_heads))
    return replace(config, attention=attention, parts=replace(config.parts, has_embedding_norm=True))


def translate_mpt(raw: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json of MPT for transformers' class, which knows no kv heads (those of Replit Code 1.5)."""
    options = raw.get("attn_config")
    if not isinstance(options, dict):
        return dict(raw)
    num_kv_heads = {"grouped_query_attention": options.get("kv_n_heads"), "multiquery_attention": 1}
    if (kind := options.get("attn_type")) not in num_kv_heads:
        return dict(raw)
    own = {name: value for name, value in options.items() if name not in ("attn_type", "kv_n_heads")}
    return dict(raw) | {"attn_config": own, "kv_n_heads": num_kv_heads[kind]}


def read_mpt(fields: ConfigFields) -> ModelConfig:
    """MPT: ALiBi, and no biases at all."""
    fields.only("no_bias", True)
    fields.only("expansion_ratio", 4)
    fields.only("logit_scale")
    fields.only("embedding_fraction", 1.0)
    fields.ignore("learned_pos_emb")  # models with ALiBi have no such table, whatever this says
    options = fields["attn_config"]
    for name, expected in (
        ("alibi", True),
        ("attn_type", "multihead_attention"),
        ("qk_ln", False),
        ("clip_qkv", None),
        ("prefix_lm", False),
    ):
        if getattr(options, name) != expected:
            raise fields.error(f"attn_config.{name}", getattr(options, name), f"supported: {expected}")
    names = ("alibi_bias_max", "softmax_scale")
    numbers = Fields({name: getattr(options, name) for name in names}, f"{fields.path}: attn_config")
    config = _read(
        fields,
        eps="layer_norm_epsilon",
        activation=Activation.GELU,
        intermediate_size=4 * fields.size("hidden_size"),
        num_positions=fields.size("max_seq_len"),
        has_bias=False,
        num_kv_heads=fields.size("kv_n_heads") if "kv_n_heads" in fields.raw else None,
    )
    slopes = mpt_alibi_slopes(config.num_heads, numbers.number("alibi_bias_max", 8))
    attention = replace(config.attention, alibi_slopes=slopes, scale=numbers.number("softmax_scale"))
    return replace(config, attention=attention, parts=replace(config.parts, norm=NormKind.LAYER_NO_BIAS))


def read_gpt2(fields: ConfigFields, num_kv_heads: int | None = None) -> ModelConfig:
    """GPT-2 and others in its name: learned positions."""
    fields.only("scale_attn_by_inverse_layer_idx", False)
    fields.only("add_cross_attention", False)
    fields.ignore("n_ctx")  # an old name of n_positions
    num_positions = fields.size("max_position_embeddings")
    config = _read(
        fields,
        eps="layer_norm_epsilon",
        activation="activation_function",
        intermediate_size=4 * fields.size("hidden_size") if fields.get("n_inner") is None else fields.size("n_inner"),
        num_positions=num_positions,
        has_bias=True,
        num_kv_heads=num_kv_heads,
    )
    attention = config.attention if fields.flag("scale_attn_weights") else replace(config.attention, scale=1.0)
    return replace(config, attention=attention, parts=replace(config.parts, num_learned_positions=num_positions))


def read_gpt_bigcode(fields: ConfigFields) -> ModelConfig:
    """SantaCoder and StarCoder 1: a GPT-2 with one kv head, or as many as heads."""
    return read_gpt2(fields, 1 if fields.flag("multi_query") else None)


def read_gpt_neo(fields: ConfigFields) -> ModelConfig:
    """GPT-Neo: scores without a scale, windows in some layers, no biases of q, k and v."""
    fields.ignore("attention_types")  # transformers has made `attention_layers` of it
    num_positions = fields.size("max_position_embeddings")
    hidden_size, own_size = fields.size("hidden_size"), fields.get("intermediate_size")
    config = _read(
        fields,
        eps="layer_norm_epsilon",
        activation="activation_function",
        intermediate_size=4 * hidden_size if own_size is None else fields.size("intermediate_size"),
        num_positions=num_positions,
        has_bias=True,
    )
    windows = {"global": None, "local": fields.size("window_size")}
    kinds = fields["attention_layers"]
    if len(kinds) != config.num_layers or set(kinds) - windows.keys():
        raise fields.error("attention_layers", kinds, f"expected {config.num_layers} of {', '.join(windows)}")
    return replace(
        config,
        qkv_bias=False,
        sliding_windows=tuple(windows[kind] for kind in kinds),
        attention=replace(config.attention, scale=1.0),
        parts=replace(config.parts, num_learned_positions=num_positions),
    )


def read_opt(fields: ConfigFields) -> ModelConfig:
    """OPT: learned positions, the first in row 2. The 350M model normalises sums, and its embedding is narrower."""
    fields.only("layer_norm_elementwise_affine", True)
    if fields.raw.get("_remove_final_layer_norm"):
        raise fields.error("_remove_final_layer_norm", True, "supported: False")
    num_positions = fields.size("max_position_embeddings")
    config = _read(
        fields,
        eps=1e-5,
        activation="activation_function",
        intermediate_size=fields.size("ffn_dim"),
        num_positions=num_positions,
        has_bias=fields.flag("enable_bias"),
    )
    parts = replace(config.parts, num_learned_positions=num_positions, learned_position_offset=2)
    if not fields.flag("do_layer_norm_before"):
        parts = replace(parts, residual=ResidualKind.NORMED, has_norms_before=False)
    embedding_size = fields.size("word_embed_proj_dim")
    if embedding_size != config.hidden_size:
        parts = replace(parts, embedding_size=embedding_size)
    return replace(config, parts=parts)
