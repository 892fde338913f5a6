"""DeepSeek-V2 and V3: multi-head latent attention, and experts that are chosen in groups."""

from __future__ import annotations

import math
from dataclasses import replace

from services.common.families.base import read_base
from services.common.families.experts import with_grouped_experts
from services.common.families.fields import ConfigFields
from services.common.families.shape import AttentionOptions, LatentAttention, ModelConfig, RopeConfig


def read_deepseek_v2(fields: ConfigFields) -> ModelConfig:
    """DeepSeek-V2, V2-Lite and V2.5: scores of experts by a softmax, in groups or not."""
    fields.only("norm_topk_prob", False)  # transformers ignores it; the published code then drops the scaling factor
    fields.only("mlp_bias", False)
    fields.only("rope_interleave", True)
    fields.only("topk_method", "greedy", "group_limited_greedy")
    has_groups = fields["topk_method"] == "group_limited_greedy"
    if not has_groups:
        fields.ignore("n_group", "topk_group")
    config = _read_latent(fields, rotates_pairs=True)
    return with_grouped_experts(fields, config, renormalizes=False, is_sigmoid=False, has_groups=has_groups)


def read_deepseek_v3(fields: ConfigFields) -> ModelConfig:
    """DeepSeek-V3 and R1, Moonlight: scores of experts by a sigmoid, with a bias for the choice."""
    fields.only("topk_method", "noaux_tc")
    num_drafting = fields.get("num_nextn_predict_layers", 0)  # layers after the last one, which draft tokens
    if type(num_drafting) is not int or num_drafting < 0:
        raise fields.error("num_nextn_predict_layers", num_drafting, "expected a number of layers")
    config = _read_latent(fields, rotates_pairs=fields.flag("rope_interleave"))
    config = replace(config, num_stored_layers=config.num_layers + num_drafting)
    return with_grouped_experts(fields, config, renormalizes=fields.flag("norm_topk_prob"), is_sigmoid=True)


def read_youtu(fields: ConfigFields) -> ModelConfig:
    """Youtu-LLM: DeepSeek-V3's latent attention without experts."""
    fields.ignore("embedding_initializer_range")
    return _read_latent(fields, rotates_pairs=fields.flag("rope_interleave"))


def read_glm4_moe_lite(fields: ConfigFields) -> ModelConfig:
    """GLM-4.7-Flash: DeepSeek-V3's layers, of which `mlp_layer_types` says which have experts."""
    fields.only("topk_method", "noaux_tc")
    kinds = list(fields["mlp_layer_types"])
    num_plain = kinds.index("sparse") if "sparse" in kinds else len(kinds)
    config = _read_latent(fields, rotates_pairs=fields.flag("rope_interleave"))
    if kinds != ["dense"] * num_plain + ["sparse"] * (config.num_layers - num_plain):
        wanted = f"expected dense, then sparse, for each of its {config.num_layers} layers"
        raise fields.error("mlp_layer_types", kinds, wanted)
    fields.only("first_k_dense_replace", num_plain)
    fields.ignore("num_nextn_predict_layers")  # layers after the last one, which draft tokens
    has_renormalized = fields.flag("norm_topk_prob")
    return with_grouped_experts(fields, config, renormalizes=has_renormalized, is_sigmoid=True, num_plain=num_plain)


def _read_latent(fields: ConfigFields, *, rotates_pairs: bool) -> ModelConfig:
    """The sizes, with the geometry that the attention worker sees: see `LatentAttention`."""
    num_heads, num_kv_heads = fields.size("num_attention_heads"), fields.get("num_key_value_heads")
    if num_kv_heads not in (None, num_heads):
        raise fields.error("num_key_value_heads", num_kv_heads, f"expected its num_attention_heads {num_heads}")
    query_rank = fields.get("q_lora_rank")
    latent = LatentAttention(
        query_rank=None if query_rank is None else fields.size("q_lora_rank"),
        rank=fields.size("kv_lora_rank"),
        plain_dim=fields.size("qk_nope_head_dim"),
        rotated_dim=fields.size("qk_rope_head_dim"),
        value_dim=fields.size("v_head_dim"),
    )
    has_bias = fields.flag("attention_bias")
    if has_bias and query_rank is None:
        raise fields.error("attention_bias", True, "supported with q_lora_rank only")
    fields.ignore("head_dim", "qk_head_dim")  # what transformers makes of the sizes above
    config = read_base(fields)  # with heads of `rotated_dim`
    scale = (latent.plain_dim + latent.rotated_dim) ** -0.5 * _score_multiplier(config.rope)
    return replace(
        config,
        num_kv_heads=1,
        head_dim=latent.rotated_dim + latent.rank,
        qkv_bias=has_bias,
        o_bias=has_bias,
        parts=replace(config.parts, latent=latent),
        attention=AttentionOptions(scale=scale, rotates_pairs=rotates_pairs, value_dim=latent.rank),
    )


def _score_multiplier(rope: RopeConfig) -> float:
    """What yarn's `mscale_all_dim` adds to the scale of the scores, besides `attention_scale` of cos and sin."""
    if rope.rope_type == "default" or rope.mscale_all_dim is None or rope.factor <= 1:
        return 1.0
    return (0.1 * rope.mscale_all_dim * math.log(rope.factor) + 1) ** 2
