"""The text part of Gemma 4: layers with other heads, v as k, norms of v and a number that multiplies each layer."""

from __future__ import annotations

from dataclasses import replace

from services.common.families.base import read_base, read_window, windows_of_layers
from services.common.families.fields import ConfigFields
from services.common.families.rope import read_ropes_by_type
from services.common.families.shape import (
    AttentionOptions,
    ExpertOptions,
    LayerHeads,
    LayerInputOptions,
    ModelConfig,
)


def read_gemma4(fields: ConfigFields) -> ModelConfig:
    """Gemma 4: layers with a window have heads of one size, those that see everything fewer and larger ones."""
    fields.only("use_bidirectional_attention", "vision")  # of the tokens of images alone
    heads, kinds = _read_heads(fields), fields["layer_types"]
    head_dims = {kind: each.head_dim for kind, each in zip(kinds, heads, strict=True)}
    for layer, (kind, each) in enumerate(zip(kinds, heads, strict=True)):
        if each.head_dim != head_dims[kind]:
            others = f"but {head_dims[kind]} in others of {kind}"
            raise fields.error(f"head_dim of layer {layer}", each.head_dim, others)
    ropes = read_ropes_by_type(fields, head_dims)
    config = read_base(
        fields,
        activation="hidden_activation",
        num_kv_heads=heads[-1].num_kv_heads,  # of a layer that sees everything, as the last one always does
        head_dim=heads[-1].head_dim,
        rope=ropes["full_attention"],
    )
    has_bias = fields.flag("attention_bias")
    full_layers = tuple(i for i, kind in enumerate(kinds) if kind == "full_attention")
    sizes: tuple[int, ...] = ()
    if fields.flag("use_double_wide_mlp"):
        sizes = tuple(config.intermediate_size * (1 if each.kv_layer is None else 2) for each in heads)
    parts = replace(
        config.parts,
        experts=_read_experts(fields, config),
        layer_inputs=_read_layer_inputs(fields),
        layer_intermediate_sizes=sizes,
        embedding_multiplier=config.hidden_size**0.5,
        is_multiplier_of_table=True,
        has_norms_after=True,
        has_v_norm=True,
        key_value_layers=full_layers if fields.flag("attention_k_eq_v") else (),
        has_layer_scalar=True,
        logit_softcap=fields.number("final_logit_softcapping"),
    )
    attention = AttentionOptions(scale=1.0, layer_ropes=tuple(ropes[kind] for kind in kinds), layer_heads=heads)
    windows = windows_of_layers(fields, read_window(fields))
    return replace(
        config,
        qkv_bias=has_bias,
        o_bias=has_bias,
        qk_norm=True,
        parts=parts,
        attention=attention,
        sliding_windows=windows,
    )


def _read_heads(fields: ConfigFields) -> tuple[LayerHeads, ...]:
    """The heads of each layer. transformers has made `per_layer_config` of the fields for those that see everything."""
    fields.ignore("global_head_dim", "num_global_key_value_heads", "num_key_value_heads", "head_dim")
    given = fields.raw.get("per_layer_config") or {}
    others = {name for each in given.values() for name in each} - {"head_dim", "num_key_value_heads"}
    if others:
        raise fields.error("per_layer_config with", sorted(others), "supported: head_dim, num_key_value_heads")
    num_heads, layers = fields.size("num_attention_heads"), fields["per_layer_config"]
    found = []
    for layer in range(fields.size("num_hidden_layers")):
        num_kv_heads, head_dim = layers[layer].num_key_value_heads, layers[layer].head_dim
        if type(num_kv_heads) is not int or num_kv_heads < 1 or num_heads % num_kv_heads:
            wanted = f"expected a divisor of its num_attention_heads {num_heads}"
            raise fields.error(f"num_key_value_heads of layer {layer}", num_kv_heads, wanted)
        if type(head_dim) is not int or head_dim < 2 or head_dim % 2:
            raise fields.error(f"head_dim of layer {layer}", head_dim, "expected an even number of at least 2")
        found.append(LayerHeads(num_heads, num_kv_heads, head_dim))
    return _with_shared_keys(fields, found)


def _with_shared_keys(fields: ConfigFields, heads: list[LayerHeads]) -> tuple[LayerHeads, ...]:
    """The last `num_kv_shared_layers` layers read the keys and values of the last one before them of their type."""
    num_shared, kinds = fields["num_kv_shared_layers"], fields["layer_types"]
    first = len(heads) - num_shared
    if not 0 <= num_shared < len(heads) or not set(kinds[first:]) <= set(kinds[:first]):
        wanted = f"expected less than its {len(heads)} layers, and before them one of each type that they have"
        raise fields.error("num_kv_shared_layers", num_shared, wanted)
    sources = {kind: layer for layer, kind in enumerate(kinds[:first])}
    shared = [replace(heads[sources[kind]], kv_layer=sources[kind]) for kind in kinds[first:]]
    return (*heads[:first], *shared)


def _read_experts(fields: ConfigFields, config: ModelConfig) -> ExpertOptions | None:
    """In all layers, beside their MLP."""
    fields.ignore("num_experts", "top_k_experts", "moe_intermediate_size")
    if not fields.flag("enable_moe_block"):
        return None
    num_experts, num_per_token = fields.size("num_experts"), fields.size("top_k_experts")
    if num_per_token > num_experts:
        raise fields.error("top_k_experts", num_per_token, f"expected at most its {num_experts} experts")
    layers, size = tuple(range(config.num_layers)), fields.size("moe_intermediate_size")
    return ExpertOptions(num_experts, num_per_token, size, True, layers, is_beside_mlp=True)


def _read_layer_inputs(fields: ConfigFields) -> LayerInputOptions | None:
    vocab_size = fields["vocab_size_per_layer_input"]
    if not fields["hidden_size_per_layer_input"]:
        return None
    if vocab_size < fields.size("vocab_size"):
        wanted = f"expected at least its vocab_size {fields['vocab_size']}"
        raise fields.error("vocab_size_per_layer_input", vocab_size, wanted)
    return LayerInputOptions(fields.size("hidden_size_per_layer_input"), fields.size("num_hidden_layers"), vocab_size)
