"""`TextEncoderConfig`: the shape of an encoder of text, read from a Hugging Face directory.

transformers parses config.json, and a function for each family reads the result. What would change the computation and
is not supported is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from services.common.encoders.encoder_types import is_encoder, is_encoder_type
from services.common.errors import ModelError
from services.common.families.kinds import Activation, NormKind
from services.common.hf_config import parse_hf_config
from services.common.json_files.fields import Fields
from services.common.json_files.read_json import read_json
from services.common.model_config import ModelConfig, load_model_config

_ACTIVATIONS = {  # by transformers' names
    "gelu": Activation.GELU,
    "gelu_new": Activation.GELU_TANH,
    "gelu_pytorch_tanh": Activation.GELU_TANH,
    "relu": Activation.RELU,
    "silu": Activation.SILU,
}


@dataclass(frozen=True, slots=True)
class EncoderLayer:
    """What one layer has of its own."""

    rope_theta: float | None = None  # None: positions are not rotated
    window: int | None = None  # a token sees those at most so many places away; None: all


@dataclass(frozen=True, slots=True)
class Disentangled:
    """Scores that also depend on the distance, by content and position (DeBERTa, arXiv:2006.03654).

    Query i and key j get, besides q_i · k_j, the products q_i · pk and k_j · pq, where pk and pq are projections of the
    row of a table for the distance i - j: log-spaced buckets beyond a half of `num_buckets`, if there are any.
    """

    span: int  # half of the table's rows, which are for distances from -span to span - 1
    num_buckets: int  # 0: distances are not in buckets
    max_distance: int  # where the last bucket begins
    has_query_terms: bool  # q_i · pk
    has_key_terms: bool  # k_j · pq
    shares_projections: bool  # positions are projected by the matrices of k and q; otherwise by their own
    has_norm: bool  # the table's rows are normalised


@dataclass(frozen=True, slots=True)
class TextEncoderConfig:
    """An encoder. Its layers normalise either sums (as BERT) or their inputs (`has_norms_before`, as ModernBERT)."""

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    layers: tuple[EncoderLayer, ...]
    norm_eps: float
    activation: Activation
    max_input_tokens: int
    checkpoint_dtype: str
    position_offset: int | None = 0  # row of the table of the first token's position; None: there is no table
    num_positions: int = 0  # rows of this table
    padding_id: int | None = None  # a token that has no position of its own, but the row before `position_offset`
    num_token_types: int = 0  # rows of the table of types of tokens; 0: there is none
    num_distance_buckets: int = 0  # of a bias of attention by distance; 0: there is none
    has_norms_before: bool = False
    is_gated: bool = False  # the MLP multiplies its activation by a second projection
    has_attention_bias: bool = True
    has_mlp_bias: bool = True
    classifier_activation: Activation | Literal["tanh"] = "tanh"  # of the layer before a classifier's last one
    norm: NormKind = NormKind.LAYER  # or without bias, or RMS_PLUS_ONE
    has_norms_after: bool = False  # what a half of a layer adds is normalised, too
    has_embedding_norm: bool = True
    embedding_multiplier: float = 1.0
    embedding_width: int | None = None  # of the table's rows, which are projected to the hidden size; None: equal
    kv_heads: int | None = None  # None: as many as heads of q
    head_size: int | None = None  # None: the hidden size divided by the heads
    has_head_norms: bool = False  # of q and k, the same for all heads
    attention_scale: float | None = None  # None: head_dim ** -0.5
    disentangled: Disentangled | None = None

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def head_dim(self) -> int:
        return self.head_size or self.hidden_size // self.num_heads

    @property
    def num_kv_heads(self) -> int:
        return self.kv_heads or self.num_heads

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """None: it generates nothing."""
        return ()

    @property
    def embedding_size(self) -> int:
        return self.hidden_size


def read_served_config(path: Path, num_layers: int | None = None) -> ModelConfig | TextEncoderConfig:
    """The shape of any model that is served, a decoder or an encoder, by `path`/config.json.

    `num_layers` keeps only so many first layers. Raises `ModelError`.
    """
    return read_encoder_config(path, num_layers) if is_encoder(path) else load_model_config(path, num_layers)


def read_encoder_config(path: Path, num_layers: int | None = None) -> TextEncoderConfig:
    """Reads `path`/config.json of an encoder. `num_layers` keeps only so many first layers. Raises `ModelError`."""
    raw = read_json(path / "config.json")
    if raw is None:
        raise ModelError(f"model directory {path} has no config.json")
    family = raw.get("model_type")
    if family not in _ENCODERS or not is_encoder_type(raw):
        raise ModelError(f"{path} has model_type {family!r}, the encoders are {', '.join(_ENCODERS)}")
    if raw.get("quantization_config") is not None:
        raise ModelError(f"{path} has quantization_config, which encoders do not support")
    try:
        values = parse_hf_config(raw).to_dict()
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise ModelError(f"{path} has no valid {family} config.json: {error}") from error
    config = _ENCODERS[family](_EncoderFields(values, str(path)))
    if config.num_heads % config.num_kv_heads:
        count = config.num_heads
        raise ModelError(f"{path} has {count} heads, expected a multiple of its {config.num_kv_heads} kv heads")
    if config.head_size is None and config.hidden_size % config.num_heads:
        size, count = config.hidden_size, config.num_heads
        raise ModelError(f"{path} has hidden size {size}, expected a multiple of its {count} heads")
    if num_layers is not None:
        if not 1 <= num_layers <= config.num_layers:
            raise ModelError(f"num_layers is {num_layers}, the model in {path} allows 1 to {config.num_layers}")
        config = replace(config, layers=config.layers[:num_layers])
    return config


class _EncoderFields(Fields):
    """The fields of a config.json with transformers' defaults."""

    def activation(self, name: str) -> Activation:
        value = self.get(name)
        if value not in _ACTIVATIONS:
            raise self.unsupported(name, value, ", ".join(_ACTIVATIONS))
        return _ACTIVATIONS[value]


def _check_positions(fields: _EncoderFields) -> None:
    """Others are mostly those of a class beside the checkpoint, such as JinaBERT's or JinaColBERT's."""
    name, kind = "position_embedding_type", fields.get("position_embedding_type", "absolute")
    classes = fields.get("auto_map")
    own_class = classes.get("AutoModel") if isinstance(classes, dict) else None
    if kind != "absolute" and own_class:
        raise fields.error(name, kind, f"and the class {own_class!r}: remote code, which is never run")
    fields.one_of(name, ("absolute",), "absolute")


def _read_base(
    fields: _EncoderFields, layers: tuple[EncoderLayer, ...], *, eps: str, activation: str
) -> TextEncoderConfig:
    """What all families but DistilBERT name alike; `eps` and `activation` name the fields of these."""
    return TextEncoderConfig(
        family=fields.get("model_type"),
        vocab_size=fields.size("vocab_size"),
        hidden_size=fields.size("hidden_size"),
        intermediate_size=fields.size("intermediate_size"),
        num_heads=fields.size("num_attention_heads"),
        layers=layers,
        norm_eps=float(fields.number(eps) or 0.0),
        activation=fields.activation(activation),
        max_input_tokens=fields.size("max_position_embeddings"),
        checkpoint_dtype=fields.dtype,
    )


def _read_plain(fields: _EncoderFields) -> TextEncoderConfig:
    """BERT's layers, which are all alike, and its types of tokens."""
    layers = (EncoderLayer(),) * fields.size("num_hidden_layers")
    config = _read_base(fields, layers, eps="layer_norm_eps", activation="hidden_act")
    return replace(
        config, num_positions=config.max_input_tokens, num_token_types=fields.get("type_vocab_size", 0)
    )


def _read_bert(fields: _EncoderFields) -> TextEncoderConfig:
    """BERT, and what RoBERTa, XLM-R and MPNet have in common with it."""
    _check_positions(fields)
    fields.refuse("is_decoder", "add_cross_attention")
    return _read_plain(fields)


def _read_roberta(fields: _EncoderFields) -> TextEncoderConfig:
    """RoBERTa and XLM-R: positions begin behind that of padding."""
    config = _read_bert(fields)
    offset = int(fields.get("pad_token_id", 0)) + 1
    if offset >= config.num_positions:
        raise fields.error("max_position_embeddings", config.num_positions, f"expected more than {offset}")
    most = config.num_positions - offset
    return replace(config, position_offset=offset, max_input_tokens=most, padding_id=offset - 1)


def _read_mpnet(fields: _EncoderFields) -> TextEncoderConfig:
    """MPNet: a bias of attention by distance, the same in all layers; no types of tokens."""
    config = _read_roberta(fields)
    return replace(config, num_distance_buckets=fields.size("relative_attention_num_buckets"), num_token_types=0)


def _read_distilbert(fields: _EncoderFields) -> TextEncoderConfig:
    """DistilBERT: BERT without types of tokens, in other words."""
    num_positions = fields.size("max_position_embeddings")
    return TextEncoderConfig(
        family="distilbert",
        vocab_size=fields.size("vocab_size"),
        hidden_size=fields.size("dim"),
        intermediate_size=fields.size("hidden_dim"),
        num_heads=fields.size("n_heads"),
        layers=(EncoderLayer(),) * fields.size("n_layers"),
        norm_eps=1e-12,
        activation=fields.activation("activation"),
        max_input_tokens=num_positions,
        checkpoint_dtype=fields.dtype,
        num_positions=num_positions,
        classifier_activation=Activation.RELU,
    )


def _read_modernbert(fields: _EncoderFields) -> TextEncoderConfig:
    """ModernBERT: rotated positions, windows in most layers, gated MLPs, norms before both halves of a layer."""
    layers = _rotated_layers(fields, fields.size("local_attention") // 2)
    return replace(
        _read_base(fields, layers, eps="norm_eps", activation="hidden_activation"),
        position_offset=None,
        has_norms_before=True,
        is_gated=True,
        has_attention_bias=bool(fields.get("attention_bias")),
        has_mlp_bias=bool(fields.get("mlp_bias")),
        norm=NormKind.LAYER if fields.get("norm_bias") else NormKind.LAYER_NO_BIAS,
        classifier_activation=fields.activation("classifier_activation"),
    )


def _read_gemma(fields: _EncoderFields) -> TextEncoderConfig:
    """EmbeddingGemma: Gemma 3 whose attention sees all tokens, in most layers within a window."""
    fields.refuse("attn_logit_softcapping", "attention_bias")
    layers = _rotated_layers(fields, fields.size("sliding_window") // 2)
    config = _read_base(fields, layers, eps="rms_norm_eps", activation="hidden_activation")
    return replace(
        config,
        position_offset=None,
        has_norms_before=True,
        is_gated=True,
        has_attention_bias=False,
        has_mlp_bias=False,
        norm=NormKind.RMS_PLUS_ONE,
        has_norms_after=True,
        has_embedding_norm=False,
        embedding_multiplier=config.hidden_size**0.5,
        kv_heads=fields.size("num_key_value_heads"),
        head_size=fields.size("head_dim"),
        has_head_norms=True,
        attention_scale=fields.size("query_pre_attn_scalar") ** -0.5,
    )


def _read_deberta(fields: _EncoderFields) -> TextEncoderConfig:
    """DeBERTa v2 and v3: BERT with disentangled attention, mostly without a table of positions."""
    fields.one_of("conv_kernel_size", (0,), 0)
    fields.one_of("relative_attention", (True,), False)
    config = _read_plain(fields)
    width, head_size = config.hidden_size, config.head_dim
    fields.one_of("attention_head_size", (head_size,), head_size)
    max_distance = fields.get("max_relative_positions", -1)
    if max_distance < 1:
        max_distance = config.num_positions
    num_buckets = max(0, fields.get("position_buckets", -1))
    terms = fields.get("pos_att_type") or []
    if not set(terms) <= {"c2p", "p2c"}:
        raise fields.unsupported("pos_att_type", terms, "c2p, p2c")
    norms = str(fields.get("norm_rel_ebd", "none")).lower()
    if norms not in ("none", "layer_norm"):
        raise fields.unsupported("norm_rel_ebd", norms, "none, layer_norm")
    has_positions = bool(fields.get("position_biased_input", True))
    embedding_size = fields.get("embedding_size", width)
    return replace(
        config,
        position_offset=0 if has_positions else None,
        num_positions=config.num_positions if has_positions else 0,
        classifier_activation=fields.activation("pooler_hidden_act"),
        embedding_width=None if embedding_size == width else embedding_size,
        attention_scale=(head_size * (1 + len(set(terms)))) ** -0.5,
        disentangled=Disentangled(
            span=num_buckets or max_distance,
            num_buckets=num_buckets,
            max_distance=max_distance,
            has_query_terms="c2p" in terms,
            has_key_terms="p2c" in terms,
            shares_projections=bool(fields.get("share_att_key", False)),
            has_norm=norms == "layer_norm",
        ),
    )


def _rotated_layers(fields: _EncoderFields, window: int) -> tuple[EncoderLayer, ...]:
    """Layers whose positions are rotated, with or without a window."""
    ropes = fields.inner("rope_parameters")
    kinds, layers = fields.get("layer_types"), list[EncoderLayer]()
    if not isinstance(kinds, list) or len(kinds) != fields.size("num_hidden_layers"):
        raise fields.error("layer_types", kinds, f"expected one for each of {fields.get('num_hidden_layers')} layers")
    for kind in kinds:
        if kind not in ("full_attention", "sliding_attention"):
            raise fields.unsupported("layer_types", kind, "full_attention, sliding_attention")
        rope = ropes.inner(kind)
        rope.one_of("rope_type", ("default",), "default")
        layers.append(EncoderLayer(rope.number("rope_theta"), window if kind == "sliding_attention" else None))
    return tuple(layers)


_ENCODERS: Mapping[str, Callable[[Any], TextEncoderConfig]] = {  # by model_type, see `is_encoder_type`
    "bert": _read_bert,
    "roberta": _read_roberta,
    "xlm-roberta": _read_roberta,
    "distilbert": _read_distilbert,
    "mpnet": _read_mpnet,
    "modernbert": _read_modernbert,
    "deberta-v2": _read_deberta,
    "gemma3_text": _read_gemma,
}
