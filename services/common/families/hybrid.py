"""Families whose layers have attention, Mamba 2 recurrences (Bamba, Granite 4, Nemotron-H) or convolutions (LFM2).

Mamba 2 has nothing but recurrences.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from services.common.families.base import read_base
from services.common.families.experts import with_biased_experts, with_granite_experts
from services.common.families.fields import ConfigFields
from services.common.families.llama import with_granite_multipliers
from services.common.families.rope import no_rope
from services.common.families.shape import (
    Activation,
    AttentionOptions,
    LayerHeads,
    ModelConfig,
    Recurrence,
    ShortConvolution,
    StateSpace,
)

_MAMBA_POSITIONS = 2**20  # a state has no limit; this many tokens of a text are counted


def read_bamba(fields: ConfigFields) -> ModelConfig:
    """Bamba: an MLP in each layer, half of each head rotated."""
    fields.ignore("num_logits_to_keep", "z_loss_coefficient")
    config = read_base(fields, allows_partial_rope=True)
    has_bias = fields.flag("attention_bias")
    config = replace(config, qkv_bias=has_bias, o_bias=has_bias, mlp_bias=fields.flag("mlp_bias"))
    kinds = fields["layers_block_type"]
    fields.ignore("attn_layer_indices")  # transformers has made these kinds of it
    return _with_recurrences(fields, config, kinds, _read_mamba(fields))


def read_granitemoehybrid(fields: ConfigFields) -> ModelConfig:
    """Granite 4: an MLP in each layer, in some experts beside it; the multipliers of Granite, in some no rotation."""
    fields.only("position_embedding_type", "rope", "nope")
    rotates = fields.get("position_embedding_type") == "rope"
    num_positions, size = fields.size("max_position_embeddings"), fields.size("shared_intermediate_size")
    rope = None
    if not rotates:
        fields.ignore("rope_scaling", "rope_theta")
        rope = no_rope(fields.size("hidden_size") // fields.size("num_attention_heads"), num_positions)
    config = read_base(fields, intermediate_size=size, rope=rope)
    has_bias = fields.flag("attention_bias")
    config = with_granite_multipliers(fields, replace(config, qkv_bias=has_bias, o_bias=has_bias))
    if not rotates:
        ropes = (None,) * config.num_layers
        config = replace(config, attention=replace(config.attention, layer_ropes=ropes))
    if fields["num_local_experts"]:
        config = with_granite_experts(fields, config, fields.size("intermediate_size"), shared_intermediate_size=size)
    else:
        fields.ignore("intermediate_size", "num_experts_per_tok", "output_router_logits", "router_aux_loss_coef")
    kinds = fields["layers_block_type"]
    fields.ignore("layer_types")
    if "linear_attention" not in kinds:
        fields.ignore("time_step_limit", *(name for name in fields.raw if name.startswith("mamba_")))
        return config
    return _with_recurrences(fields, config, kinds, _read_mamba(fields))


def read_nemotron_h(fields: ConfigFields) -> ModelConfig:
    """Nemotron-H and Nemotron Nano 2: blocks of a recurrence, attention or an MLP; no rotation, a squared ReLU.

    A block of an MLP belongs to the layer whose recurrence or attention is before it. Mixtures of experts are refused.
    """
    fields.ignore("hybrid_override_pattern", "layer_types", "num_nextn_predict_layers", "mtp_hybrid_override_pattern")
    fields.ignore("mtp_layers_block_type", "use_mamba_kernels", "mamba_ssm_cache_dtype", "hidden_dropout")
    fields.only("sliding_window")
    fields.only("attention_bias", False)
    fields.only("mamba_proj_bias", False)
    fields.only("mamba_hidden_act", "silu")
    kinds = fields["layers_block_type"]
    blocks: list[tuple[int, int | None]] = []
    for number, kind in enumerate(kinds):
        is_first_mlp = bool(blocks) and blocks[-1][1] is None
        if kind not in ("linear_attention", "full_attention", "mlp") or (kind == "mlp" and not is_first_mlp):
            wanted = "expected linear_attention, full_attention, and after each of them one mlp at most"
            raise fields.error("layers_block_type", list(kinds), wanted)
        if kind == "mlp":
            blocks[-1] = (blocks[-1][0], number)
        else:
            blocks.append((number, None))
    head_dim, num_layers = fields.size("head_dim"), len(blocks)
    rope = no_rope(head_dim, fields.size("max_position_embeddings"))
    config = read_base(fields, eps="layer_norm_epsilon", activation="mlp_hidden_act", head_dim=head_dim, rope=rope)
    parts = replace(
        config.parts,
        is_gated=False,
        blocks=tuple(blocks),
        layers_without_mlp=tuple(layer for layer, (_, mlp) in enumerate(blocks) if mlp is None),
    )
    config = replace(
        config,
        num_layers=num_layers,
        mlp_bias=fields.flag("mlp_bias"),
        sliding_windows=(None,) * num_layers,
        parts=parts,
        attention=AttentionOptions(layer_ropes=(None,) * num_layers),
    )
    mamba = StateSpace(
        num_heads=fields.size("mamba_num_heads"),
        head_dim=fields.size("mamba_head_dim"),
        state_size=fields.size("ssm_state_size"),
        num_groups=fields.size("n_groups"),
        conv_size=fields.size("conv_kernel"),
        has_conv_bias=fields.flag("use_conv_bias"),
        time_step_limits=(float(fields["time_step_min"]), float("inf")),  # `time_step_limit` is not used
    )
    fields.ignore("time_step_limit", "time_step_max", "time_step_floor", "chunk_size", "expand")
    fields.ignore("rescale_prenorm_residual", "residual_in_fp32")
    mixers = [kinds[number] for number, _ in blocks]
    return _with_recurrences(fields, config, mixers, mamba, has_bias=fields.flag("use_bias"))


def read_lfm2(fields: ConfigFields) -> ModelConfig:
    """LFM2: short convolutions in place of attention in most layers, norms of heads."""
    size = fields.size("intermediate_size")
    if fields.flag("block_auto_adjust_ff_dim"):
        size, multiple = int(2 * size / 3), fields.size("block_multiple_of")
        if (multiplier := fields.number("block_ffn_dim_multiplier")) is not None:
            size = multiple * -(-int(multiplier * size) // multiple)
    fields.ignore("block_multiple_of", "block_ffn_dim_multiplier", "full_attn_idxs", "block_ff_dim", "tie_embedding")
    config = read_base(fields, eps="norm_eps", activation=Activation.SILU, intermediate_size=size)
    config = replace(config, qk_norm=True)
    has_bias = fields.flag("conv_bias")
    convolution = ShortConvolution(config.hidden_size, fields.size("conv_L_cache"), has_bias)
    kinds = ["linear_attention" if kind == "conv" else kind for kind in fields["layer_types"]]
    return _with_recurrences(fields, config, kinds, convolution, has_bias=has_bias)


def read_lfm2_moe(fields: ConfigFields) -> ModelConfig:
    """LFM2 8B-A1B: LFM2 with experts after the first layers, chosen by a sigmoid with a bias."""
    fields.only("use_expert_bias", True)
    config = replace(read_base(fields, eps="norm_eps", activation=Activation.SILU), qk_norm=True)
    num_plain = fields["num_dense_layers"]
    if type(num_plain) is not int or not 0 <= num_plain < config.num_layers:
        raise fields.error("num_dense_layers", num_plain, f"expected less than its {config.num_layers} layers")
    config = with_biased_experts(
        fields,
        config,
        num_plain=num_plain,
        renormalizes=fields.flag("norm_topk_prob"),
        multiplier=fields.number("routed_scaling_factor", 1.0),
    )
    fields.ignore("tie_embedding")
    has_bias = fields.flag("conv_bias")
    convolution = ShortConvolution(config.hidden_size, fields.size("conv_L_cache"), has_bias)
    kinds = ["linear_attention" if kind == "conv" else kind for kind in fields["layer_types"]]
    return _with_recurrences(fields, config, kinds, convolution, has_bias=has_bias)


def translate_mamba2(raw: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json with fields that other families have: the heads of the recurrence, and a number of positions."""
    return {"max_position_embeddings": _MAMBA_POSITIONS} | dict(raw) | {"num_attention_heads": raw.get("num_heads")}


def read_mamba2(fields: ConfigFields) -> ModelConfig:
    """Mamba 2 and Codestral Mamba: nothing but the recurrence. Texts may be as long as positions are counted."""
    fields.only("hidden_act", "silu")
    num_heads, head_dim = fields.size("num_heads"), fields.size("head_dim")
    config = read_base(
        fields,
        eps="layer_norm_epsilon",
        intermediate_size=num_heads * head_dim,
        num_kv_heads=num_heads,
        head_dim=head_dim,
        rope=no_rope(head_dim, fields.size("max_position_embeddings")),
    )
    fields.ignore("expand", "chunk_size", "residual_in_fp32", "rescale_prenorm_residual", "num_attention_heads")
    fields.ignore("time_step_rank", "time_step_min", "time_step_max", "time_step_floor")
    layers, limits = tuple(range(config.num_layers)), fields["time_step_limit"]
    config = replace(
        config,
        parts=replace(config.parts, layers_without_mlp=layers),
        attention=AttentionOptions(layer_ropes=(None,) * config.num_layers),
    )
    mamba = StateSpace(
        num_heads=num_heads,
        head_dim=head_dim,
        state_size=fields.size("state_size"),
        num_groups=fields.size("n_groups"),
        conv_size=fields.size("conv_kernel"),
        has_conv_bias=fields.flag("use_conv_bias"),
        time_step_limits=(float(limits[0]), float(limits[1])),
    )
    kinds = ["linear_attention"] * config.num_layers
    return _with_recurrences(fields, config, kinds, mamba, has_bias=fields.flag("use_bias"))


def _read_mamba(fields: ConfigFields) -> StateSpace:
    """The recurrence by the fields of Bamba and Granite 4."""
    fields.ignore("mamba_expand", "mamba_chunk_size")
    limits = fields["time_step_limit"]
    return StateSpace(
        num_heads=fields.size("mamba_n_heads"),
        head_dim=fields.size("mamba_d_head"),
        state_size=fields.size("mamba_d_state"),
        num_groups=fields.size("mamba_n_groups"),
        conv_size=fields.size("mamba_d_conv"),
        has_conv_bias=fields.flag("mamba_conv_bias"),
        time_step_limits=(float(limits[0]), float(limits[1])),
    )


def _with_recurrences(
    fields: ConfigFields,
    config: ModelConfig,
    kinds: Sequence[str],
    recurrence: Recurrence,
    has_bias: bool | None = None,
) -> ModelConfig:
    """`kinds`: of each layer, linear_attention or full_attention. `has_bias` None: `mamba_proj_bias` says it."""
    if len(kinds) != config.num_layers or set(kinds) - {"linear_attention", "full_attention"}:
        wanted = f"expected {config.num_layers} of linear_attention, full_attention"
        raise fields.error("layer_types", list(kinds), wanted)
    if recurrence.conv_size < 2:
        raise fields.error("the convolution's size", recurrence.conv_size, "expected at least 2")
    if isinstance(recurrence, StateSpace) and recurrence.num_heads % recurrence.num_groups:
        wanted = f"expected a multiple of its number of groups {recurrence.num_groups}"
        raise fields.error("the recurrence's number of heads", recurrence.num_heads, wanted)
    heads = LayerHeads(config.num_heads, config.num_kv_heads, config.head_dim)
    by_kind = {"full_attention": heads, "linear_attention": replace(heads, recurrence=recurrence)}
    has_bias = fields.flag("mamba_proj_bias") if has_bias is None else has_bias
    return replace(
        config,
        parts=replace(config.parts, mixer_bias=has_bias),
        attention=replace(config.attention, layer_heads=tuple(by_kind[kind] for kind in kinds)),
    )
