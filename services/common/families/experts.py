"""Families whose layers, all or some of them, are mixtures of experts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from services.common.families.base import read_base, read_head_dim, read_window, windows_of_layers
from services.common.families.fields import ConfigFields
from services.common.families.llama import (
    read_ernie4_5,
    read_exaone4,
    read_granite,
    read_granite_swa,
    read_mistral,
    read_olmo2,
    read_qwen3_vl,
)
from services.common.families.rope import read_rope
from services.common.families.shape import (
    AttentionOptions,
    ClampedSwiglu,
    ExpertOptions,
    GroupedRouting,
    ModelConfig,
    NormKind,
    QkNormKind,
)

# What other mixtures do, with the values by which they do not.
_OTHER_MIXTURES = {
    "scoring_func": "softmax",
    "n_shared_experts": 0,
    "first_k_dense_replace": 0,
    "routed_scaling_factor": 1,
    "n_group": 1,
    "topk_group": 1,
}


def read_mixtral(fields: ConfigFields) -> ModelConfig:
    """Mixtral: a Mistral with experts in all layers."""
    config = read_mistral(fields)
    size, layers = config.intermediate_size, tuple(range(config.num_layers))
    return _with_experts(fields, config, intermediate_size=size, renormalizes=True, layers=layers)


def read_qwen2_moe(fields: ConfigFields) -> ModelConfig:
    """Qwen1.5-MoE and Qwen2-MoE: one more expert for all tokens, behind a gate."""
    fields.ignore("use_sliding_window")  # transformers has made `sliding_window` and `layer_types` of it
    window = read_window(fields) if fields["sliding_window"] else None  # 0: none
    windows = windows_of_layers(fields, window)
    config = replace(read_base(fields), qkv_bias=fields.flag("qkv_bias"), sliding_windows=windows)
    shared_size = fields.size("shared_expert_intermediate_size")
    return with_qwen_experts(fields, config, shared_intermediate_size=shared_size, has_shared_gate=True)


def read_qwen3_moe(fields: ConfigFields) -> ModelConfig:
    """Qwen3-MoE: norms of heads, and one window for all layers, or none."""
    fields.ignore("use_sliding_window")  # transformers has made `sliding_window` of it
    config = read_mistral(fields)
    fields.only("use_qk_norm", True)  # the next three are in some files and say what the class does anyway
    fields.only("qkv_bias", False)
    fields.only("shared_expert_intermediate_size", 0)
    has_bias = fields.flag("attention_bias")
    return with_qwen_experts(fields, replace(config, qkv_bias=has_bias, o_bias=has_bias, qk_norm=True))


def read_qwen3_vl_moe(fields: ConfigFields) -> ModelConfig:
    """The text part of Qwen3-VL's mixtures: that of Qwen3-VL with experts."""
    fields.only("norm_topk_prob", True)  # in some files; the class divides by the sum anyway
    return with_qwen_experts(fields, read_qwen3_vl(fields), renormalizes=True)


def read_olmoe(fields: ConfigFields) -> ModelConfig:
    """OLMoE: experts in all layers, norms of q and k over all heads."""
    fields.only("clip_qkv")
    config, has_bias = read_base(fields), fields.flag("attention_bias")
    parts = replace(config.parts, qk_norm=QkNormKind.ALL_HEADS)
    return _with_experts(
        fields,
        replace(config, qkv_bias=has_bias, o_bias=has_bias, qk_norm=True, parts=parts),
        intermediate_size=config.intermediate_size,
        renormalizes=fields.flag("norm_topk_prob"),
        layers=tuple(range(config.num_layers)),
    )


def read_flex_olmo(fields: ConfigFields) -> ModelConfig:
    """FlexOlmo: an OLMo 2 with experts in all layers."""
    config = read_olmo2(fields)
    return _with_experts(
        fields,
        config,
        intermediate_size=config.intermediate_size,
        renormalizes=fields.flag("norm_topk_prob"),
        layers=tuple(range(config.num_layers)),
    )


def read_phimoe(fields: ConfigFields) -> ModelConfig:
    """Phi-3.5-MoE: LayerNorm, experts in all layers, chosen one after the other; longrope with a scale of its own."""
    fields.ignore("input_jitter_noise")  # for training
    rope, parameters = read_rope(fields, read_head_dim(fields)), fields["rope_parameters"]
    if rope.rope_type == "longrope":
        scale, other = parameters.get("short_mscale"), parameters.get("long_mscale")
        if scale != other or type(scale) is not float or scale <= 0:
            wanted = f"expected a number above 0, as long_mscale {other}"
            raise fields.error("rope parameter short_mscale", scale, wanted)
        rope = replace(rope, attention_factor=scale)
    elif rope.rope_type != "default":
        raise fields.error("rope_type", rope.rope_type, "supported: default, longrope")
    config, has_bias = read_base(fields, rope=rope), fields.flag("attention_bias")
    jitter = fields["router_jitter_noise"]
    if type(jitter) is not float or not 0 <= jitter < 1:
        raise fields.error("router_jitter_noise", jitter, "expected a number from 0, below 1")
    parts = replace(config.parts, norm=NormKind.LAYER, head_bias=fields.flag("lm_head_bias"))
    return _with_experts(
        fields,
        replace(
            config,
            qkv_bias=has_bias,
            o_bias=has_bias,
            sliding_windows=(read_window(fields),) * config.num_layers,
            parts=parts,
        ),
        "num_local_experts",
        intermediate_size=config.intermediate_size,
        renormalizes=False,
        layers=tuple(range(config.num_layers)),
        mixer_jitter=jitter,
    )


def read_exaone_moe(fields: ConfigFields) -> ModelConfig:
    """K-EXAONE: EXAONE 4 with norms before attention and MLP, and DeepSeek-V3's routing after the plain layers."""
    config = read_exaone4(fields)
    parts = replace(config.parts, has_norms_before=True, has_norms_after=False)
    fields.ignore("first_k_dense_replace")  # transformers has made `mlp_layer_types` of it
    return with_listed_experts(
        fields,
        replace(config, parts=parts),
        renormalizes=fields.flag("norm_topk_prob"),
        multiplier=fields.number("routed_scaling_factor", 1.0),
        groups=_read_groups(fields, "num_experts", least_size=2),
    )


def read_hy_v3(fields: ConfigFields) -> ModelConfig:
    """Hy3: a Qwen3 with DeepSeek-V3's routing, one more expert for all tokens, plain layers first."""
    fields.ignore("enable_moe_fp32_combine")  # of the sum of experts, which has 32 bits in any case
    fields.only("mlp_bias", False)
    config, has_bias = read_base(fields), fields.flag("attention_bias")
    return with_listed_experts(
        fields,
        replace(config, qkv_bias=has_bias, o_bias=has_bias, qk_norm=True),
        renormalizes=True,
        multiplier=fields.number("router_scaling_factor", 1.0),
        groups=(1, 1),
    )


def with_listed_experts(
    fields: ConfigFields, config: ModelConfig, *, renormalizes: bool, multiplier: float, groups: tuple[int, int]
) -> ModelConfig:
    """DeepSeek-V3's experts in the layers that `mlp_layer_types` calls sparse, and more for all tokens."""
    kinds, size = fields["mlp_layer_types"], fields.size("moe_intermediate_size")
    if len(kinds) != config.num_layers or set(kinds) - {"dense", "sparse"}:
        raise fields.error("mlp_layer_types", kinds, f"expected {config.num_layers} of dense, sparse")
    return _with_experts(
        fields,
        config,
        intermediate_size=size,
        renormalizes=renormalizes,
        layers=tuple(layer for layer, kind in enumerate(kinds) if kind == "sparse"),
        shared_intermediate_size=size * fields.size("num_shared_experts"),
        grouped=GroupedRouting(*groups, multiplier=multiplier, is_sigmoid=True),
    )


def read_dots1(fields: ConfigFields) -> ModelConfig:
    """dots.llm1: a Qwen3 with DeepSeek-V3's routing, plain layers first, windows in some layers."""
    config, has_bias = read_base(fields), fields.flag("attention_bias")
    windows = windows_of_layers(fields, read_window(fields))
    config = replace(config, qkv_bias=has_bias, o_bias=has_bias, qk_norm=True, sliding_windows=windows)
    return with_grouped_experts(fields, config, renormalizes=fields.flag("norm_topk_prob"), is_sigmoid=True)


def read_glm4_moe(fields: ConfigFields) -> ModelConfig:
    """GLM-4.5 and 4.6: DeepSeek's routing, plain layers first, partial rotation, in some norms of heads."""
    fields.ignore("num_mtp_layers", "num_nextn_predict_layers")  # layers after the last one, which draft tokens
    config = read_base(fields, allows_partial_rope=True)
    config = replace(config, qkv_bias=fields.flag("attention_bias"), qk_norm=fields.flag("use_qk_norm"))
    return with_grouped_experts(fields, config, renormalizes=fields.flag("norm_topk_prob"), is_sigmoid=True)


def read_ernie4_5_moe(fields: ConfigFields) -> ModelConfig:
    """ERNIE 4.5's mixtures: scores of experts by a softmax, with a bias for the choice; more experts for all tokens."""
    fields.only("use_bias", False)
    config, size = read_ernie4_5(fields), fields.size("moe_intermediate_size")
    first, last, step = (fields[f"moe_layer_{name}"] for name in ("start_index", "end_index", "interval"))
    fields.ignore("moe_norm_min")  # the weights of chosen experts never add up to so little
    num_shared = fields["moe_num_shared_experts"]
    return _with_experts(
        fields,
        config,
        intermediate_size=size,
        renormalizes=True,
        layers=tuple(i for i in range(config.num_layers) if first <= i <= last and (i + 1) % step == 0),
        shared_intermediate_size=size * num_shared or None,
        grouped=GroupedRouting(1, 1, multiplier=1.0, is_sigmoid=False, has_softmax_bias=True),
    )


def read_solar_open(fields: ConfigFields) -> ModelConfig:
    """Solar Open: DeepSeek-V3's routing in all layers, one more expert for all tokens."""
    config = read_base(fields, intermediate_size=fields.size("moe_intermediate_size"), allows_partial_rope=True)
    config = replace(config, qkv_bias=fields.flag("attention_bias"))
    fields.only("first_k_dense_replace", 0)
    has_renormalized = fields.flag("norm_topk_prob")
    return with_grouped_experts(fields, config, renormalizes=has_renormalized, is_sigmoid=True, num_plain=0)


def read_minimax_m2(fields: ConfigFields) -> ModelConfig:
    """MiniMax-M2: DeepSeek-V3's routing without groups, partial rotation, norms of q and k over all heads."""
    fields.ignore("rotary_dim")  # transformers has made `partial_rotary_factor` of it
    fields.ignore("use_mtp", "num_mtp_modules", "mtp_transformer_layers")  # layers which draft tokens
    config = read_base(fields, allows_partial_rope=True)
    fields.only("use_qk_norm", True)  # this and the next are in the published files and say what the class does anyway
    fields.only("qk_norm_type", "per_layer")
    fields.only("use_routing_bias", True)
    fields.only("scoring_func", "sigmoid")
    fields.only("shared_intermediate_size", 0)
    fields.only("attn_type_list", [1] * config.num_layers)
    num_experts = fields.size("num_local_experts")
    if num_experts < 2:
        raise fields.error("num_local_experts", num_experts, "expected at least 2")
    parts = replace(config.parts, qk_norm=QkNormKind.ALL_HEADS)
    return _with_experts(
        fields,
        replace(config, qk_norm=True, parts=parts),
        "num_local_experts",
        intermediate_size=config.intermediate_size,
        renormalizes=True,
        layers=tuple(range(config.num_layers)),
        grouped=GroupedRouting(num_groups=1, num_groups_per_token=1, multiplier=1.0, is_sigmoid=True),
    )


def read_granitemoe(fields: ConfigFields) -> ModelConfig:
    """Granite 3's mixtures: a Granite with experts in all layers."""
    config = read_granite(fields)
    return with_granite_experts(fields, config, config.intermediate_size)


def read_granitemoeshared(fields: ConfigFields) -> ModelConfig:
    """Granite 3's mixtures with one more expert for all tokens, or none."""
    config, shared_size = read_granite(fields), fields["shared_intermediate_size"]
    if shared_size == 0:
        return with_granite_experts(fields, config, config.intermediate_size)
    return with_granite_experts(fields, config, config.intermediate_size, fields.size("shared_intermediate_size"))


def read_granitemoe_swa(fields: ConfigFields) -> ModelConfig:
    """Granite's mixtures with windows in some layers and learned sinks, in some with one more expert for all tokens."""
    config, shared_size = read_granite_swa(fields), fields["shared_intermediate_size"]
    return with_granite_experts(fields, config, config.intermediate_size, shared_size or None)


def with_experts_in(fields: ConfigFields, config: ModelConfig, layers: tuple[int, ...]) -> ModelConfig:
    """Experts as large as an MLP in some layers; their weights do not add up to 1."""
    size = config.intermediate_size
    return _with_experts(fields, config, intermediate_size=size, renormalizes=False, layers=layers)


def with_granite_experts(
    fields: ConfigFields, config: ModelConfig, intermediate_size: int, shared_intermediate_size: int | None = None
) -> ModelConfig:
    """Experts in all layers, in some with one more for all tokens."""
    return _with_experts(
        fields,
        config,
        "num_local_experts",
        intermediate_size=intermediate_size,
        renormalizes=True,
        layers=tuple(range(config.num_layers)),
        shared_intermediate_size=shared_intermediate_size,
    )


def read_gpt_oss(fields: ConfigFields) -> ModelConfig:
    """gpt-oss: experts with biases and an activation of their own in all layers, learned sinks, windows."""
    fields.only("hidden_act", "silu")  # the class clamps this activation
    config, num_per_token = read_base(fields), fields.size("num_experts_per_tok")
    if fields.raw.get("experts_per_token") not in (None, num_per_token):  # another spelling
        other = fields.raw["experts_per_token"]
        raise fields.error("experts_per_token", other, f"but also num_experts_per_tok {num_per_token}")
    has_bias = fields.flag("attention_bias")
    config = replace(
        config,
        qkv_bias=has_bias,
        o_bias=has_bias,
        mlp_bias=True,
        sliding_windows=windows_of_layers(fields, read_window(fields)),
        attention=AttentionOptions(has_sinks=True),
    )
    return _with_experts(
        fields,
        config,
        "num_local_experts",
        intermediate_size=config.intermediate_size,
        renormalizes=True,
        layers=tuple(range(config.num_layers)),
        has_router_bias=True,
        clamped=ClampedSwiglu(fields.number("swiglu_alpha", 1.702), fields.number("swiglu_limit", 7.0)),
    )


def with_grouped_experts(
    fields: ConfigFields,
    config: ModelConfig,
    *,
    renormalizes: bool,
    is_sigmoid: bool,
    has_groups: bool = True,
    num_plain: int | None = None,
) -> ModelConfig:
    """DeepSeek's experts, and one more for all tokens; the first layers have none. `has_groups`: see `GroupedRouting`.

    Without groups, all experts are one. `num_plain` None: `first_k_dense_replace` says how many layers have none.
    """
    fields.only("scoring_func", "sigmoid" if is_sigmoid else "softmax")
    fields.only("moe_layer_freq", 1)
    size = fields.size("moe_intermediate_size")
    num_plain = fields["first_k_dense_replace"] if num_plain is None else num_plain
    if type(num_plain) is not int or num_plain < 0:
        raise fields.error("first_k_dense_replace", num_plain, "expected a number of layers")
    multiplier = fields.number("routed_scaling_factor", 1.0)
    num_groups, num_per_token = (1, 1)
    if has_groups:
        num_groups, num_per_token = _read_groups(fields, "n_routed_experts", least_size=1 + is_sigmoid)
    return _with_experts(
        fields,
        config,
        "n_routed_experts",
        intermediate_size=size,
        renormalizes=renormalizes,
        layers=tuple(range(num_plain, config.num_layers)),
        shared_intermediate_size=size * fields.size("n_shared_experts"),
        grouped=GroupedRouting(num_groups, num_per_token, multiplier, is_sigmoid),
    )


def _read_groups(fields: ConfigFields, count: str, least_size: int) -> tuple[int, int]:
    """The number of groups, and of those that a token chooses from. `count` is the field with the number of experts."""
    num_experts, num_groups = fields.size(count), fields.size("n_group")
    group_size, num_per_token = num_experts // num_groups, fields.size("topk_group")
    if num_experts % num_groups or group_size < least_size:
        wanted = f"expected equal groups of at least {least_size} of its {num_experts} experts"
        raise fields.error("n_group", num_groups, wanted)
    if not fields.size("num_experts_per_tok") <= num_per_token * group_size <= num_experts:
        wanted = f"expected at most {num_groups}, and enough for num_experts_per_tok {fields['num_experts_per_tok']}"
        raise fields.error("topk_group", num_per_token, wanted)
    return num_groups, num_per_token


def with_biased_experts(
    fields: ConfigFields, config: ModelConfig, *, num_plain: int, renormalizes: bool, multiplier: float
) -> ModelConfig:
    """DeepSeek-V3's experts in one group, without one for all tokens."""
    return _with_experts(
        fields,
        config,
        intermediate_size=fields.size("moe_intermediate_size"),
        renormalizes=renormalizes,
        layers=tuple(range(num_plain, config.num_layers)),
        grouped=GroupedRouting(num_groups=1, num_groups_per_token=1, multiplier=multiplier, is_sigmoid=True),
    )


def with_qwen_experts(
    fields: ConfigFields, config: ModelConfig, *, renormalizes: bool | None = None, **options: Any
) -> ModelConfig:
    """Experts in every layer whose number, counted from 1, `decoder_sparse_step` divides.

    renormalizes: None: as `norm_topk_prob` says
    """
    step, plain = fields.size("decoder_sparse_step"), fields["mlp_only_layers"]
    if not isinstance(plain, list) or any(type(layer) is not int or layer < 0 for layer in plain):
        raise fields.error("mlp_only_layers", plain, "expected a list of numbers of layers")
    return _with_experts(
        fields,
        config,
        intermediate_size=fields.size("moe_intermediate_size"),
        renormalizes=fields.flag("norm_topk_prob") if renormalizes is None else renormalizes,
        layers=tuple(i for i in range(config.num_layers) if i not in plain and (i + 1) % step == 0),
        **options,
    )


def _with_experts(fields: ConfigFields, config: ModelConfig, count: str = "num_experts", **options: Any) -> ModelConfig:
    """`count` is the field that has the number of experts."""
    fields.ignore("router_jitter_noise", "router_aux_loss_coef", "output_router_logits")  # for training
    if "grouped" not in options:
        for name, neutral in _OTHER_MIXTURES.items():
            fields.only(name, neutral)
    num_experts, num_per_token = fields.size(count), fields.size("num_experts_per_tok")
    for name in ("num_experts", "num_local_experts", count):  # spellings; transformers takes one of them if they differ
        if fields.raw.get(name) not in (None, num_experts):
            raise fields.error(name, fields.raw[name], f"but also {num_experts} experts")
    if num_per_token > num_experts:
        raise fields.error("num_experts_per_tok", num_per_token, f"expected at most its {num_experts} experts")
    experts = ExpertOptions(num_experts, num_per_token, **options)
    return replace(config, parts=replace(config.parts, experts=experts))
