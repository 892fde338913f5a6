"""Families with rotary embeddings and LayerNorm: GPT-J, CodeGen, GPT-NeoX, Phi-1 and 2, StarCoder2, StableLM, Nemotron,
Falcon."""

from __future__ import annotations

from dataclasses import replace

from services.common.families.alibi import alibi_slopes, bfloat16
from services.common.families.base import read_base, read_window
from services.common.families.fields import ConfigFields
from services.common.families.shape import AttentionOptions, ModelConfig, NormKind, ResidualKind, RopeConfig


def read_gptj(fields: ConfigFields) -> ModelConfig:
    """GPT-J and CodeGen: parallel residual with one norm, neighbouring pairs of a part of each head, a biased head."""
    fields.ignore("n_ctx")  # an old name of n_positions
    num_positions, hidden_size = fields.size("max_position_embeddings"), fields.size("hidden_size")
    head_dim, rotary_dim = hidden_size // fields.size("num_attention_heads"), fields.size("rotary_dim")
    if rotary_dim % 2 or rotary_dim > head_dim:
        raise fields.error("rotary_dim", rotary_dim, f"expected an even part of the head's {head_dim} dimensions")
    config = read_base(
        fields,
        eps="layer_norm_epsilon",
        activation="activation_function",
        intermediate_size=4 * hidden_size if fields.get("n_inner") is None else fields.size("n_inner"),
        num_kv_heads=fields.size("num_attention_heads"),
        num_positions=num_positions,
        rope=RopeConfig("default", 1e4, rotary_dim, num_positions),
    )
    parts = replace(
        config.parts,
        norm=NormKind.LAYER,
        is_gated=False,
        residual=ResidualKind.PARALLEL,
        shares_norm=True,
        head_bias=True,
    )
    return replace(config, parts=parts, mlp_bias=True, attention=AttentionOptions(rotates_pairs=True))


def read_gpt_neox(fields: ConfigFields) -> ModelConfig:
    """GPT-NeoX, Pythia, and others in its name: parallel residual with two norms, partial rotation."""
    num_heads = fields.size("num_attention_heads")
    config = read_base(fields, eps="layer_norm_eps", num_kv_heads=num_heads, allows_partial_rope=True)
    residual = ResidualKind.PARALLEL if fields.flag("use_parallel_residual") else ResidualKind.SEQUENTIAL
    has_bias = fields.flag("attention_bias")
    parts = replace(config.parts, norm=NormKind.LAYER, is_gated=False, residual=residual)
    return replace(config, parts=parts, qkv_bias=has_bias, o_bias=has_bias, mlp_bias=True)


def read_phi(fields: ConfigFields) -> ModelConfig:
    """Phi-1, Phi-1.5 and Phi-2: parallel residual with one norm, biases everywhere, also in the head."""
    fields.only("qk_layernorm", False)
    config = read_base(fields, eps="layer_norm_eps", allows_partial_rope=True)
    parts = replace(
        config.parts,
        norm=NormKind.LAYER,
        is_gated=False,
        residual=ResidualKind.PARALLEL,
        shares_norm=True,
        head_bias=True,
    )
    return replace(config, parts=parts, qkv_bias=True, o_bias=True, mlp_bias=True)


def read_starcoder2(fields: ConfigFields) -> ModelConfig:
    """StarCoder2: an MLP without a gate, biases, and a window or none."""
    config = read_base(fields, eps="norm_epsilon")
    has_bias = fields.flag("use_bias")
    return replace(
        config,
        parts=replace(config.parts, norm=NormKind.LAYER, is_gated=False),
        qkv_bias=has_bias,
        o_bias=has_bias,
        mlp_bias=has_bias,
        sliding_windows=(read_window(fields),) * config.num_layers,
    )


def read_stablelm(fields: ConfigFields) -> ModelConfig:
    """StableLM 2 and 3B: a Llama with LayerNorm and partial rotation; some have a parallel residual with one norm."""
    fields.only("qk_layernorm", False)
    config = read_base(fields, eps="layer_norm_eps", allows_partial_rope=True)
    is_parallel = fields.flag("use_parallel_residual")
    residual = ResidualKind.PARALLEL if is_parallel else ResidualKind.SEQUENTIAL
    parts = replace(config.parts, norm=NormKind.LAYER, residual=residual, shares_norm=is_parallel)
    return replace(config, parts=parts, qkv_bias=fields.flag("use_qkv_bias"))


def read_olmo(fields: ConfigFields) -> ModelConfig:
    """OLMo 1: LayerNorm without weight and bias."""
    fields.only("clip_qkv")
    config, has_bias = read_base(fields, eps=1e-5), fields.flag("attention_bias")
    parts = replace(config.parts, norm=NormKind.LAYER_UNWEIGHTED)
    return replace(config, qkv_bias=has_bias, o_bias=has_bias, parts=parts)


def read_jais2(fields: ConfigFields) -> ModelConfig:
    """Jais 2: LayerNorm, a squared ReLU, biases."""
    return _without_gate(fields, read_base(fields, eps="layer_norm_eps"), NormKind.LAYER)


def read_nemotron(fields: ConfigFields) -> ModelConfig:
    """Nemotron-3 and 4, Minitron (NeMo's GPT): norms with 1 + weight, a squared ReLU, half of each head rotated."""
    config = read_base(fields, eps="norm_eps", allows_partial_rope=True)
    return _without_gate(fields, config, NormKind.LAYER_PLUS_ONE)


def _without_gate(fields: ConfigFields, config: ModelConfig, norm: NormKind) -> ModelConfig:
    """The config with these norms, a plain MLP, and the biases that its fields name."""
    has_bias = fields.flag("attention_bias")
    return replace(
        config,
        parts=replace(config.parts, norm=norm, is_gated=False),
        qkv_bias=has_bias,
        o_bias=has_bias,
        mlp_bias=fields.flag("mlp_bias"),
    )


def read_falcon(fields: ConfigFields) -> ModelConfig:
    """Falcon 7B (one kv head), 40B and 180B (the new decoder), and the RW models (ALiBi, sequential residual)."""
    is_new, is_parallel, has_one_kv_head = (
        fields.flag(name) for name in ("new_decoder_architecture", "parallel_attn", "multi_query")
    )
    num_heads, declared_kv_heads = fields.size("num_attention_heads"), fields.get("num_kv_heads")
    if is_new:
        fields.only("parallel_attn", True)
        num_kv_heads = declared_kv_heads or num_heads
    else:
        num_kv_heads = 1 if has_one_kv_head else num_heads
    num_norms = fields.get("num_ln_in_parallel_attn", 2 if is_new else 1)
    if num_norms not in ((1, 2) if is_new else (1,)):
        raise fields.error("num_ln_in_parallel_attn", num_norms, f"supported: {'1, 2' if is_new else '1'}")
    config = read_base(
        fields,
        eps="layer_norm_epsilon",
        activation="activation",
        intermediate_size=fields.size("ffn_hidden_size"),
        num_kv_heads=num_kv_heads,
    )
    residual = ResidualKind.PARALLEL if is_parallel else ResidualKind.SEQUENTIAL
    parts = replace(
        config.parts,
        norm=NormKind.LAYER,
        is_gated=False,
        residual=residual,
        shares_norm=is_parallel and num_norms == 1,
    )
    attention = AttentionOptions()
    if fields.flag("alibi"):
        scale = config.head_dim**-0.5  # the whole sum is scaled, and the slopes are rounded
        slopes = tuple(bfloat16(slope) * scale for slope in alibi_slopes(num_heads))
        attention = AttentionOptions(alibi_slopes=slopes, layer_ropes=(None,) * config.num_layers)
    has_bias = fields.flag("bias")
    return replace(
        config, parts=parts, attention=attention, qkv_bias=has_bias, o_bias=has_bias, mlp_bias=has_bias
    )
