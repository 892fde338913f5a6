"""What all families read from a config.json: `read_base` gives a Llama, of which a family replaces what differs."""

from __future__ import annotations

import math

from services.common.families.fields import MAX_LAYERS, ConfigFields
from services.common.families.rope import read_rope
from services.common.families.shape import Activation, LayerParts, ModelConfig, RopeConfig
from services.common.json_files.read_json import read_json

_ACTIVATIONS = {  # by transformers' names
    "silu": Activation.SILU,
    "swish": Activation.SILU,
    "gelu": Activation.GELU,
    "gelu_new": Activation.GELU_TANH,
    "gelu_fast": Activation.GELU_TANH,
    "gelu_pytorch_tanh": Activation.GELU_TANH,
    "relu": Activation.RELU,
    "relu2": Activation.RELU_SQUARED,
}


def read_base(
    fields: ConfigFields,
    *,
    eps: str | float = "rms_norm_eps",
    activation: str | Activation = "hidden_act",
    intermediate_size: int | None = None,
    num_kv_heads: int | None = None,
    head_dim: int | None = None,
    num_positions: int | None = None,
    rope: RopeConfig | None = None,
    allows_partial_rope: bool = False,
) -> ModelConfig:
    """The sizes, activation, rotary embedding and tokens of a model, with the parts of Llama.

    `eps` and `activation` name the fields, or are what the family always has. None stands for `intermediate_size`,
    `num_key_value_heads`, `head_dim` and `max_position_embeddings` of the config, and for one rotary embedding of all
    layers, which may turn a part of each head only if `allows_partial_rope`.
    """
    num_heads = fields.size("num_attention_heads")
    if num_kv_heads is None:
        num_kv_heads = fields.size("num_key_value_heads") if fields.get("num_key_value_heads") else num_heads
    if num_heads % num_kv_heads:
        raise fields.error(
            "num_attention_heads", num_heads, f"expected a multiple of its num_key_value_heads {num_kv_heads}"
        )
    head_dim = head_dim or read_head_dim(fields)
    norm_eps = fields[eps] if isinstance(eps, str) else eps
    if norm_eps is None or not (math.isfinite(norm_eps) and norm_eps >= 0):
        raise fields.error(str(eps), norm_eps, "expected a finite number of at least 0")
    num_layers = fields.size("num_hidden_layers", MAX_LAYERS)
    return ModelConfig(
        family=fields.family,
        vocab_size=fields.size("vocab_size"),
        hidden_size=fields.size("hidden_size"),
        intermediate_size=intermediate_size or fields.size("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        norm_eps=float(norm_eps),
        tie_word_embeddings=fields.flag("tie_word_embeddings"),
        qkv_bias=False,
        o_bias=False,
        mlp_bias=False,
        qk_norm=False,
        sliding_windows=(None,) * num_layers,
        max_position_embeddings=num_positions or fields.size("max_position_embeddings"),
        rope=rope or read_rope(fields, head_dim, allows_partial=allows_partial_rope),
        eos_token_ids=_eos_token_ids(fields),
        checkpoint_dtype=fields.dtype,
        parts=LayerParts(activation=_activation(fields, activation)),
    )


def read_head_dim(fields: ConfigFields) -> int:
    """The size of a head: the field, or the hidden size divided by the number of heads."""
    head_dim = fields.get("head_dim") or fields.size("hidden_size") // fields.size("num_attention_heads")
    if head_dim < 2 or head_dim % 2:
        raise fields.error("head_dim", head_dim, "expected an even number of at least 2")
    return head_dim


def windows_of_layers(fields: ConfigFields, window: int | None) -> tuple[int | None, ...]:
    """The window of each layer by `layer_types`: `window` for those of type sliding_attention, None for the others."""
    layer_types = fields["layer_types"]
    unsupported = set(layer_types) - {"full_attention", "sliding_attention"}
    if unsupported:
        raise fields.error("layer_types", sorted(unsupported), "supported: full_attention, sliding_attention")
    if window is None and "sliding_attention" in layer_types:
        raise fields.error("layer_types", "sliding_attention", "but use_sliding_window is off")
    return tuple(window if kind == "sliding_attention" else None for kind in layer_types)


def read_window(fields: ConfigFields) -> int | None:
    """The field `sliding_window`: at least 1, or None."""
    window = fields.get("sliding_window")
    if window is not None and window < 1:
        raise fields.error("sliding_window", window, "expected at least 1")
    return window


def _activation(fields: ConfigFields, name: str | Activation) -> Activation:
    if isinstance(name, Activation):
        return name
    found = fields[name]
    if found not in _ACTIVATIONS:
        raise fields.error(name, found, f"supported: {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[found]


def _eos_token_ids(fields: ConfigFields) -> tuple[int, ...]:
    """The ids in generation_config.json, as in Hugging Face `generate`; if it has none, those in config.json."""
    generation = read_json(fields.path / "generation_config.json") or {}
    eos = generation.get("eos_token_id")
    if eos is None:
        eos = fields.get("eos_token_id")
    if eos is None:
        return ()
    token_ids = eos if isinstance(eos, list) else [eos]
    if any(type(token_id) is not int for token_id in token_ids):
        raise fields.error("eos_token_id", eos, "expected a token id or a list of them")
    return tuple(token_id for token_id in token_ids if token_id >= 0)  # -1 means none
