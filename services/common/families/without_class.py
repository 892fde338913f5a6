"""Families of which transformers has no class: Baichuan, ChatGLM, InternLM 1 and 2, Kimi K2, Qwen 1, Skywork.

They are almost the same as others, whose classes read their config.json after fields were renamed. No code that comes
with a model is run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from services.common.errors import ModelError
from services.common.families.alibi import alibi_slopes
from services.common.families.base import read_base, read_head_dim
from services.common.families.fields import ConfigFields
from services.common.families.llama import read_llama
from services.common.families.rope import no_rope
from services.common.families.shape import AttentionOptions, ModelConfig
from services.common.json_files.fields import Fields

Translate = Callable[[Mapping[str, Any]], dict[str, Any]]

WITHOUT_CLASS = "of which transformers has no class, and code that comes with a model is never run"
_BAICHUAN_2_VOCAB_SIZE = 125_696


def read_as(model_type: str, **names: str) -> Translate:
    """Makes of a config.json one for the class of `model_type`; `names` are that class's names of fields, by own ones.

    Fields that are not renamed stay as they are, unless another one takes their name.
    """

    def translate(raw: Mapping[str, Any]) -> dict[str, Any]:
        fields = {name: value for name, value in raw.items() if name not in names and name != "architectures"}
        renamed = {names[name]: value for name, value in raw.items() if name in names and value is not None}
        return fields | renamed | {"model_type": model_type}

    return translate


def read_baichuan(fields: ConfigFields) -> ModelConfig:
    """Baichuan 1 and 2: a Llama with one projection of q, k and v.

    The 13B models, which say no max_position_embeddings, have ALiBi and no rotation. The rows of the head of Baichuan 2
    have length 1, which the published code recognises by the size of the vocabulary.
    """
    if fields.raw.get("max_position_embeddings") is not None:
        config = read_base(fields)
    else:
        num_positions = fields.size("model_max_length")
        rope = no_rope(read_head_dim(fields), num_positions)
        config = read_base(fields, num_positions=num_positions, rope=rope)
        slopes, ropes = alibi_slopes(config.num_heads), (None,) * config.num_layers
        config = replace(config, attention=AttentionOptions(alibi_slopes=slopes, layer_ropes=ropes))
    return replace(config, parts=replace(config.parts, has_unit_head=config.vocab_size == _BAICHUAN_2_VOCAB_SIZE))


def read_chatglm(fields: ConfigFields) -> ModelConfig:
    """ChatGLM 2 and 3, and GLM-4 in its first form: half of each head rotated, in neighbouring pairs."""
    for name, expected in (
        ("position_encoding_2d", False),  # of the first ChatGLM
        ("rmsnorm", True),
        ("post_layer_norm", True),
        ("apply_residual_connection_post_layernorm", False),
        ("add_bias_linear", False),
        ("original_rope", True),
        ("fp32_residual_connection", False),
        ("pre_seq_len", None),
    ):
        fields.only(name, expected)
    _check_sees_nothing(fields, "vision_config", "GLM-4V")
    has_groups = fields.flag("multi_query_attention")
    num_kv_heads = fields.size("num_key_value_heads" if has_groups else "num_attention_heads")
    config = read_base(fields, num_kv_heads=num_kv_heads, allows_partial_rope=True)
    ratio = Fields(fields.raw, fields.where).number("rope_ratio", 1.0)
    return replace(
        config,
        rope=replace(config.rope, theta=config.rope.theta * ratio),
        qkv_bias=fields.flag("attention_bias"),
        attention=AttentionOptions(rotates_pairs=True),
    )


def read_internlm(fields: ConfigFields) -> ModelConfig:
    """InternLM: a Llama with biases of attention. Rotation changes with the length beyond the served positions only."""
    config = read_llama(fields)
    rotary = Fields(fields.raw.get("rotary") or {}, f"{fields.where}: rotary")
    rotary.one_of("type", ("origin", "dynamic"), "origin")
    return replace(config, rope=replace(config.rope, theta=rotary.number("base", config.rope.theta)))


def read_qwen(fields: ConfigFields) -> ModelConfig:
    """Qwen 1: biases of q, k and v. What changes with the length would begin beyond `seq_length`: the limit then."""
    _check_sees_nothing(fields, "visual", "Qwen-VL")
    fields.only("no_bias", True)
    fields.only("rotary_pct", 1.0)
    fields.only("scale_attn_weights", True)
    num_positions = fields.size("max_position_embeddings")
    if fields.flag("use_dynamic_ntk") or fields.flag("use_logn_attn"):
        num_positions = min(num_positions, fields.size("seq_length"))
    size = fields.size("intermediate_size")
    if size % 2:
        raise fields.error("intermediate_size", size, "expected an even number: that of gate and up together")
    config = read_base(fields, intermediate_size=size // 2, num_positions=num_positions)
    return replace(config, qkv_bias=True)


def _check_sees_nothing(fields: ConfigFields, name: str, model: str) -> None:
    """Refuses the model of text and images with the same model_type, whose tower is in the field `name`."""
    if fields.raw.get(name) is not None:
        raise ModelError(f"{fields.where} has {name}: this is {model}, {WITHOUT_CLASS}")
