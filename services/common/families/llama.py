"""Llama and the families that are Llamas with other biases, norms of heads, windows or multipliers."""

from __future__ import annotations

from dataclasses import replace

from services.common.families.base import read_base, read_head_dim, read_window, windows_of_layers
from services.common.families.fields import ConfigFields
from services.common.families.rope import read_ropes_by_type, with_axes
from services.common.families.shape import Activation, AttentionOptions, ModelConfig, QkNormKind, RopeConfig


def read_llama(fields: ConfigFields) -> ModelConfig:
    """Llama 1 to 3.3, and models published under its name: Yi, DeepSeek's dense ones, SmolLM and SmolLM2."""
    fields.ignore("sliding_window")  # in some files by mistake; the class knows no windows
    has_bias = fields.flag("attention_bias")
    return replace(read_base(fields), qkv_bias=has_bias, o_bias=has_bias, mlp_bias=fields.flag("mlp_bias"))


def read_arcee(fields: ConfigFields) -> ModelConfig:
    """Arcee's AFM: a Llama whose MLP has no gate."""
    config = read_llama(fields)
    return replace(config, parts=replace(config.parts, is_gated=False))


def read_apertus(fields: ConfigFields) -> ModelConfig:
    """Apertus: norms of heads, and an MLP without a gate, whose activation has learned numbers."""
    fields.only("hidden_act", "xielu")
    config, has_bias = read_base(fields, activation=Activation.XIELU), fields.flag("attention_bias")
    parts = replace(config.parts, is_gated=False)
    return replace(config, qkv_bias=has_bias, o_bias=has_bias, qk_norm=True, parts=parts)


def read_iquestcoder(fields: ConfigFields) -> ModelConfig:
    """IQuest-Coder: a Llama."""
    fields.only("clip_qkv")
    fields.only("use_sliding_window", False)
    return read_llama(fields)


def read_mistral(fields: ConfigFields) -> ModelConfig:
    """Mistral 7B to Mistral Small: one window for all layers, or none."""
    config = read_base(fields)
    return replace(config, sliding_windows=(read_window(fields),) * config.num_layers)


def read_qwen2(fields: ConfigFields) -> ModelConfig:
    """Qwen2 and Qwen2.5: biases of q, k and v; windows in some layers."""
    fields.ignore("use_sliding_window")  # transformers has made `sliding_window` and `layer_types` of it
    windows = windows_of_layers(fields, read_window(fields))
    return replace(read_base(fields), qkv_bias=True, sliding_windows=windows)


def read_qwen2_5_vl(fields: ConfigFields) -> ModelConfig:
    """The text part of Qwen2.5-VL: Qwen2 with a rotary embedding on three axes."""
    config = read_qwen2(fields)
    return replace(config, rope=with_axes(fields, config.rope))


def read_qwen3(fields: ConfigFields) -> ModelConfig:
    """Qwen3: norms of heads."""
    has_bias = fields.flag("attention_bias")
    return replace(read_qwen2(fields), qkv_bias=has_bias, o_bias=has_bias, qk_norm=True)


def read_smollm3(fields: ConfigFields) -> ModelConfig:
    """SmolLM3: some layers do not rotate."""
    fields.ignore("use_sliding_window", "no_rope_layer_interval")  # the interval fills `no_rope_layers`
    config = read_llama(fields)
    rotates = fields["no_rope_layers"]  # 1 for a layer that does, whatever the name says
    if len(rotates) != config.num_layers:
        raise fields.error("no_rope_layers", rotates, f"expected one number for each of its {config.num_layers} layers")
    ropes = tuple(config.rope if each else None for each in rotates)
    windows = windows_of_layers(fields, read_window(fields))
    return replace(config, sliding_windows=windows, attention=AttentionOptions(layer_ropes=ropes))


def read_helium(fields: ConfigFields) -> ModelConfig:
    """Helium: rotation of neighbouring pairs; o has no bias."""
    config = replace(read_llama(fields), o_bias=False)
    return replace(config, attention=AttentionOptions(rotates_pairs=True))


def read_ministral(fields: ConfigFields) -> ModelConfig:
    """Ministral 8B, and CWM: a Llama with windows in some layers."""
    config = replace(read_base(fields), mlp_bias=fields.flag("mlp_bias"))
    return replace(config, sliding_windows=windows_of_layers(fields, read_window(fields)))


def read_seed_oss(fields: ConfigFields) -> ModelConfig:
    """Seed-OSS: biases of q, k and v, and a field of its own for that of o."""
    config = read_llama(fields)
    return replace(config, o_bias=fields.flag("attention_out_bias"))


def read_ernie4_5(fields: ConfigFields) -> ModelConfig:
    """ERNIE 4.5: rotation of neighbouring pairs, and one field for all biases."""
    has_bias = fields.flag("use_bias")
    config = replace(read_base(fields), qkv_bias=has_bias, o_bias=has_bias, mlp_bias=has_bias)
    return replace(config, attention=AttentionOptions(rotates_pairs=True))


def read_qwen3_vl(fields: ConfigFields) -> ModelConfig:
    """The text part of Qwen3-VL: Qwen3 with a rotary embedding on three axes, which take turns."""
    has_bias = fields.flag("attention_bias")
    config = read_base(fields)
    return replace(config, qkv_bias=has_bias, o_bias=has_bias, qk_norm=True, rope=with_axes(fields, config.rope))


def read_olmo2(fields: ConfigFields, rope: RopeConfig | None = None) -> ModelConfig:
    """OLMo 2: norms only after attention and MLP, and norms of q and k over all heads."""
    has_bias = fields.flag("attention_bias")
    config = replace(read_base(fields, rope=rope), qkv_bias=has_bias, o_bias=has_bias)
    parts = replace(config.parts, has_norms_before=False, has_norms_after=True, qk_norm=QkNormKind.ALL_HEADS)
    return replace(config, qk_norm=True, parts=parts)


def read_olmo3(fields: ConfigFields) -> ModelConfig:
    """OLMo 3: OLMo 2 with windows in some layers, and one rotary embedding for each kind of layer."""
    kinds = fields["layer_types"]
    ropes = read_ropes_by_type(fields, dict.fromkeys(kinds, read_head_dim(fields)))
    theta = fields.raw.get("rope_theta")
    for kind, rope in ropes.items():  # transformers gives this number to layers that see everything alone
        if theta not in (None, rope.theta):
            raise fields.error("rope_theta", theta, f"but {rope.theta} in layers of {kind}")
    layer_ropes = tuple(ropes[kind] for kind in kinds)
    config = read_olmo2(fields, ropes.get("full_attention", layer_ropes[0]))
    windows = windows_of_layers(fields, read_window(fields))
    return replace(config, sliding_windows=windows, attention=AttentionOptions(layer_ropes=layer_ropes))


def read_exaone4(fields: ConfigFields) -> ModelConfig:
    """EXAONE 4.0: norms of heads, and after attention and MLP; beside windows, layers that see all do not rotate."""
    fields.only("attention_bias", False)
    fields.ignore("sliding_window_pattern")  # transformers has made `layer_types` of it
    config, window = read_base(fields), read_window(fields)
    windows = windows_of_layers(fields, window)
    ropes = tuple(config.rope if window is None or each is not None else None for each in windows)
    parts = replace(config.parts, has_norms_before=False, has_norms_after=True)
    attention = AttentionOptions(layer_ropes=ropes)
    return replace(config, qk_norm=True, parts=parts, sliding_windows=windows, attention=attention)


def read_glm(fields: ConfigFields) -> ModelConfig:
    """GLM-4 9B (2024): half of each head is rotated, in neighbouring pairs; o has no bias."""
    config = read_base(fields, allows_partial_rope=True)
    return replace(config, qkv_bias=fields.flag("attention_bias"), attention=AttentionOptions(rotates_pairs=True))


def read_glm4(fields: ConfigFields) -> ModelConfig:
    """GLM-4 0414: GLM with two more norms, after attention and after the MLP."""
    config = read_glm(fields)
    return replace(config, parts=replace(config.parts, has_norms_after=True))


def read_phi3(fields: ConfigFields) -> ModelConfig:
    """Phi-3, Phi-3.5 and Phi-4: fused projections, partial rotation, and a window or none."""
    config = read_base(fields, allows_partial_rope=True)
    return replace(config, sliding_windows=(read_window(fields),) * config.num_layers)


def read_granite(fields: ConfigFields) -> ModelConfig:
    """Granite 3: four multipliers."""
    return with_granite_multipliers(fields, read_llama(fields))


def read_hyperclovax(fields: ConfigFields) -> ModelConfig:
    """HyperCLOVA X SEED Think: a Granite with norms after attention and MLP, too; its logits are multiplied."""
    config, multiplier = read_granite(fields), fields.number("logits_scaling", 1.0)
    parts = replace(config.parts, has_norms_after=fields.flag("use_post_norm"), logit_multiplier=multiplier)
    return replace(config, parts=parts)


def read_granite_swa(fields: ConfigFields) -> ModelConfig:
    """Granite with windows in some layers and learned sinks; each layer has a rotation of its own, or none."""
    config, thetas = read_granite(fields), fields["layer_rope_theta"]
    is_list = isinstance(thetas, list) and len(thetas) == config.num_layers
    if not is_list or not all(type(each) in (int, float) and (each == 0 or each > 1) for each in thetas):
        wanted = f"expected {config.num_layers} numbers above 1, or 0 for no rotation"
        raise fields.error("layer_rope_theta", thetas, wanted)
    ropes = tuple(replace(config.rope, theta=float(each)) if each else None for each in thetas)
    windows = windows_of_layers(fields, read_window(fields))
    attention = replace(config.attention, layer_ropes=ropes, has_sinks=True)
    return replace(config, sliding_windows=windows, attention=attention)


def with_granite_multipliers(fields: ConfigFields, config: ModelConfig) -> ModelConfig:
    """The model with Granite's multipliers."""
    parts = replace(
        config.parts,
        embedding_multiplier=fields.number("embedding_multiplier", 1.0),
        residual_multiplier=fields.number("residual_multiplier", 1.0),
        logit_multiplier=1 / fields.number("logits_scaling", 1.0),
    )
    attention = AttentionOptions(scale=fields.number("attention_multiplier", 1.0))
    return replace(config, parts=parts, attention=attention)
