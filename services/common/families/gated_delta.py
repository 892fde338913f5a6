"""Families most of whose layers are gated delta layers: Qwen3-Next, Qwen3.5 and its mixtures, the text parts."""

from __future__ import annotations

from dataclasses import replace

from services.common.families.base import read_base
from services.common.families.experts import with_qwen_experts
from services.common.families.fields import ConfigFields
from services.common.families.shape import (
    AttentionOptions,
    ExpertOptions,
    GatedDelta,
    LayerHeads,
    ModelConfig,
    NormKind,
)


def read_qwen3_next(fields: ConfigFields) -> ModelConfig:
    """Qwen3-Next: gated delta layers, a gate of attention's output, and experts with one more for all tokens."""
    config = _read_gated(fields)
    shared_size = fields.size("shared_expert_intermediate_size")
    return with_qwen_experts(fields, config, shared_intermediate_size=shared_size, has_shared_gate=True)


def read_qwen3_5(fields: ConfigFields) -> ModelConfig:
    """Qwen3.5: as Qwen3-Next, with an MLP in each layer."""
    return _read_gated(fields)


def read_qwen3_5_moe(fields: ConfigFields) -> ModelConfig:
    """Qwen3.5's mixtures: as Qwen3-Next, with experts in all layers."""
    size = fields.size("moe_intermediate_size")
    config = _read_gated(fields, intermediate_size=size)
    fields.only("norm_topk_prob", True)  # in some files; the class divides by the sum anyway
    fields.ignore("output_router_logits", "router_aux_loss_coef")  # for training
    num_experts, num_per_token = fields.size("num_experts"), fields.size("num_experts_per_tok")
    if num_per_token > num_experts:
        raise fields.error("num_experts_per_tok", num_per_token, f"expected at most its {num_experts} experts")
    experts = ExpertOptions(
        num_experts,
        num_per_token,
        size,
        renormalizes=True,
        layers=tuple(range(config.num_layers)),
        shared_intermediate_size=fields.size("shared_expert_intermediate_size"),
        has_shared_gate=True,
    )
    return replace(config, parts=replace(config.parts, experts=experts))


def _read_gated(fields: ConfigFields, intermediate_size: int | None = None) -> ModelConfig:
    """What the three have in common."""
    fields.ignore("full_attention_interval")  # transformers has made `layer_types` of it
    fields.only("attn_output_gate", True)  # in some files; the classes have the gate anyway
    fields.only("hidden_act", "silu")  # the convolution has it, too
    config = read_base(fields, intermediate_size=intermediate_size, allows_partial_rope=True)
    has_bias = fields.flag("attention_bias")
    heads = LayerHeads(config.num_heads, config.num_kv_heads, config.head_dim)
    kinds = fields["layer_types"]
    unsupported = set(kinds) - {"full_attention", "linear_attention"}
    if unsupported:
        raise fields.error("layer_types", sorted(unsupported), "supported: full_attention, linear_attention")
    by_kind = {"full_attention": heads, "linear_attention": replace(heads, recurrence=_read_gated_delta(fields))}
    attention = AttentionOptions(layer_heads=tuple(by_kind[kind] for kind in kinds))
    parts = replace(config.parts, norm=NormKind.RMS_PLUS_ONE, has_attention_gate=True)
    return replace(config, qkv_bias=has_bias, o_bias=has_bias, qk_norm=True, parts=parts, attention=attention)


def _read_gated_delta(fields: ConfigFields) -> GatedDelta:
    sizes = GatedDelta(
        num_key_heads=fields.size("linear_num_key_heads"),
        num_value_heads=fields.size("linear_num_value_heads"),
        key_dim=fields.size("linear_key_head_dim"),
        value_dim=fields.size("linear_value_head_dim"),
        conv_size=fields.size("linear_conv_kernel_dim"),
    )
    if sizes.num_value_heads % sizes.num_key_heads:
        wanted = f"expected a multiple of its linear_num_key_heads {sizes.num_key_heads}"
        raise fields.error("linear_num_value_heads", sizes.num_value_heads, wanted)
    if sizes.conv_size < 2:
        raise fields.error("linear_conv_kernel_dim", sizes.conv_size, "expected at least 2")
    return sizes
