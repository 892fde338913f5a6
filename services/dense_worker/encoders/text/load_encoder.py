"""Loads a `TextEncoder` from safetensors, or makes one with random weights."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from services.common.encoders.encoder_config import Disentangled, TextEncoderConfig
from services.common.errors import ModelError
from services.common.families.kinds import NormKind
from services.common.pooling.pooling_config import ClassifierHead, PooledActivation, PoolingConfig, TokenHead
from services.dense_worker.encoders.packed_attention import PositionTerms
from services.dense_worker.encoders.text.encoder_operations import EncoderOperations, TorchEncoderOperations
from services.dense_worker.encoders.text.text_encoder import Affine, HeadLayer, LayerWeights, TextEncoder
from services.dense_worker.kernels.linear.activation import MlpActivation
from services.dense_worker.kernels.linear.quantized.layer import FLOATS
from services.dense_worker.kernels.norm.norm import HeadNorms, LayerNorm, Norm, RmsNormPlusOne
from services.dense_worker.model.checkpoint import Checkpoint, open_checkpoint
from services.dense_worker.parameters import Parameter

MAX_DISTANCE = 128  # from which on all distances have the same bias (MPNet, as T5 in arXiv:1910.10683)

# The float32 tensor of a name and shape, on the CPU.
Read = Callable[[str, tuple[int, ...]], torch.Tensor]

_ACTIVATIONS = {TokenHead.SPARSE: "relu", TokenHead.COLBERT: None}  # of layers for the states of tokens


@dataclass(frozen=True, slots=True)
class EncoderNames:
    """Names of the modules in a family's checkpoints, without the first part, which some files leave out."""

    first: str
    head: tuple[str, ...]  # the layers of a classifier; an activation follows all but the last
    embedding: str = "embeddings.word_embeddings"
    positions: str = "embeddings.position_embeddings"
    token_types: str = "embeddings.token_type_embeddings"
    embedding_norm: str = "embeddings.LayerNorm"
    layers: str = "encoder.layer"  # the number of the layer follows; the next ones are relative to it
    qkv: tuple[str, ...] = ("attention.self.query", "attention.self.key", "attention.self.value")
    o: str = "attention.output.dense"
    attention_norm: str = "attention.output.LayerNorm"
    up: tuple[str, ...] = ("intermediate.dense",)
    down: str = "output.dense"
    mlp_norm: str = "output.LayerNorm"
    norms_after: tuple[str, str] = ("", "")  # of what attention and the MLP add
    head_norms: tuple[str, str] = ("", "")  # of q and k
    has_first_norm: bool = True  # whether the first layer has a norm before attention, as the others
    projection: str = "embeddings.embed_proj"
    distance_bias: str = "encoder.relative_attention_bias"
    distances: str = "encoder.rel_embeddings"
    distance_norm: str = "encoder.LayerNorm"
    position_projections: tuple[str, str] = ("attention.self.pos_key_proj", "attention.self.pos_query_proj")
    final_norm: str = "final_norm"
    head_norm: str = ""  # of a classifier's first layer

    def canonical(self, name: str) -> str:
        """The name of a tensor as this page spells it. Old files call the tensors of norms gamma and beta."""
        name = name.removeprefix(f"{self.first}.")
        return re.sub(r"\.beta$", ".bias", re.sub(r"\.gamma$", ".weight", name))


_ROBERTA = EncoderNames("roberta", ("classifier.dense", "classifier.out_proj"))
NAMES: dict[str, EncoderNames] = {  # by `TextEncoderConfig.family`
    "bert": EncoderNames("bert", ("pooler.dense", "classifier")),
    "roberta": _ROBERTA,
    "xlm-roberta": _ROBERTA,
    "distilbert": EncoderNames(
        "distilbert",
        ("pre_classifier", "classifier"),
        layers="transformer.layer",
        qkv=("attention.q_lin", "attention.k_lin", "attention.v_lin"),
        o="attention.out_lin",
        attention_norm="sa_layer_norm",
        up=("ffn.lin1",),
        down="ffn.lin2",
        mlp_norm="output_layer_norm",
    ),
    "mpnet": EncoderNames(
        "mpnet",
        ("classifier.dense", "classifier.out_proj"),
        qkv=("attention.attn.q", "attention.attn.k", "attention.attn.v"),
        o="attention.attn.o",
        attention_norm="attention.LayerNorm",
    ),
    "modernbert": EncoderNames(
        "model",
        ("head.dense", "classifier"),
        embedding="embeddings.tok_embeddings",
        embedding_norm="embeddings.norm",
        layers="layers",
        qkv=("attn.Wqkv",),
        o="attn.Wo",
        attention_norm="attn_norm",
        up=("mlp.Wi",),
        down="mlp.Wo",
        mlp_norm="mlp_norm",
        has_first_norm=False,
        head_norm="head.norm",
    ),
    "deberta-v2": EncoderNames(
        "deberta",
        ("pooler.dense", "classifier"),
        qkv=("attention.self.query_proj", "attention.self.key_proj", "attention.self.value_proj"),
    ),
    "gemma3_text": EncoderNames(
        "model",
        (),
        embedding="embed_tokens",
        layers="layers",
        qkv=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        o="self_attn.o_proj",
        attention_norm="input_layernorm",
        up=("mlp.gate_proj", "mlp.up_proj"),
        down="mlp.down_proj",
        mlp_norm="pre_feedforward_layernorm",
        norms_after=("post_attention_layernorm", "post_feedforward_layernorm"),
        head_norms=("self_attn.q_norm", "self_attn.k_norm"),
        final_norm="norm",
    ),
}


def load_encoder(
    path: Path, config: TextEncoderConfig, pooling: PoolingConfig, dtype: torch.dtype, device: torch.device
) -> TextEncoder:
    """Reads the safetensors of the directory `path`. Raises ModelError for a tensor that is missing or too many."""
    names = NAMES[config.family]
    with open_checkpoint(path, names.canonical) as checkpoint:
        unread = set(checkpoint.names)

        def read(name: str, shape: tuple[int, ...]) -> torch.Tensor:
            if name not in checkpoint:
                raise ModelError(f"{path} lacks the tensor {name}, which its config.json calls for")
            unread.discard(name)
            return checkpoint.read(name, FLOATS, (shape,))

        encoder = _build(config, pooling, names, read, dtype, device)
        for name in sorted(unread):
            found = re.match(rf"{re.escape(names.layers)}\.(\d+)\.", name)
            if found and int(found[1]) < config.num_layers:
                raise ModelError(f"{checkpoint.file_of(name)} holds {name}, for which config.json has no place")
    return replace(encoder, token_heads=load_token_heads(path, pooling, config.hidden_size, device))


def random_encoder(
    config: TextEncoderConfig, pooling: PoolingConfig, dtype: torch.dtype, device: torch.device, seed: int
) -> TextEncoder:
    """Random weights of standard deviation 0.02; those of norms are 1. The same seed gives the same."""
    generator = torch.Generator().manual_seed(seed)

    def make(name: str, shape: tuple[int, ...]) -> torch.Tensor:
        if "norm" in name.lower() and name.endswith(".weight"):
            return torch.ones(shape)
        return torch.randn(shape, generator=generator) * 0.02

    encoder = _build(config, pooling, NAMES[config.family], make, dtype, device)
    return replace(encoder, token_heads=random_token_heads(pooling, config.hidden_size, device, generator))


def _build(
    config: TextEncoderConfig,
    pooling: PoolingConfig,
    names: EncoderNames,
    read: Read,
    dtype: torch.dtype,
    device: torch.device,
) -> TextEncoder:
    hidden, intermediate = config.hidden_size, config.intermediate_size
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    width = config.embedding_width or hidden
    rows_of_distance = None
    if config.disentangled is not None:
        rows_of_distance = disentangled_rows(config.disentangled, config.max_input_tokens).to(device)

    def tensor(name: str, *shape: int) -> torch.Tensor:
        return read(name, shape).to(device, dtype)

    def norm(name: str, size: int = hidden) -> Norm:
        weight = Parameter(f"{name}.weight", tensor(f"{name}.weight", size))
        if config.norm is NormKind.RMS_PLUS_ONE:
            return RmsNormPlusOne(weight, config.norm_eps)
        bias = Parameter(f"{name}.bias", tensor(f"{name}.bias", size)) if config.norm is NormKind.LAYER else None
        return LayerNorm(weight, bias, config.norm_eps)

    def affine(modules: tuple[str, ...], num_rows: tuple[int, ...], num_columns: int, has_bias: bool) -> Affine:
        parts = list(zip(modules, num_rows, strict=True))
        weight = torch.cat([tensor(f"{module}.weight", count, num_columns) for module, count in parts])
        bias = torch.cat([tensor(f"{module}.bias", count) for module, count in parts]) if has_bias else None
        return Affine(weight, bias)

    def next_norm(index: int) -> Norm:
        """Of the sum behind a layer."""
        if not config.has_norms_before:
            return norm(f"{names.layers}.{index}.{names.mlp_norm}")
        is_last = index + 1 == config.num_layers
        return norm(names.final_norm if is_last else f"{names.layers}.{index + 1}.{names.attention_norm}")

    def layer(index: int) -> LayerWeights:
        base = f"{names.layers}.{index}."
        head_norms = None
        if config.has_head_norms:
            of_q, of_k = (norm(base + each, config.head_dim) for each in names.head_norms)
            head_norms = HeadNorms(of_q, of_k, config.num_heads, config.num_kv_heads)
        qkv_rows = (q_size, kv_size, kv_size) if len(names.qkv) == 3 else (q_size + 2 * kv_size,)
        up_rows = (1 + config.is_gated) * intermediate
        qkv = affine(tuple(base + name for name in names.qkv), qkv_rows, hidden, config.has_attention_bias)
        return LayerWeights(
            qkv,
            head_norms,
            None if config.disentangled is None else positions(config.disentangled, base, qkv),
            affine((base + names.o,), (hidden,), q_size, config.has_attention_bias),
            norm(base + (names.mlp_norm if config.has_norms_before else names.attention_norm)),
            affine(
                tuple(base + name for name in names.up),
                (up_rows // len(names.up),) * len(names.up),
                hidden,
                config.has_mlp_bias,
            ),
            affine((base + names.down,), (hidden,), intermediate, config.has_mlp_bias),
            next_norm(index),
            norm(base + names.norms_after[0]) if config.has_norms_after else None,
            norm(base + names.norms_after[1]) if config.has_norms_after else None,
        )

    def positions(terms: Disentangled, base: str, qkv: Affine) -> PositionTerms:
        """The projections of the table of distances, which are the same for all inputs."""
        table = distances
        assert table is not None and rows_of_distance is not None and qkv.bias is not None, "DeBERTa has these"

        def projected(name: str, first_row: int) -> torch.Tensor:
            part = slice(first_row, first_row + hidden)
            by = Affine(qkv.weight[part], qkv.bias[part]) if qkv.bias is not None else None
            if not terms.shares_projections:
                by = affine((base + name,), (hidden,), hidden, True)
            assert by is not None
            return by.forward(table).unflatten(1, (config.num_heads, -1)).transpose(0, 1).contiguous()

        keys = projected(names.position_projections[0], hidden) if terms.has_query_terms else None
        queries = projected(names.position_projections[1], 0) if terms.has_key_terms else None
        return PositionTerms(keys, queries, rows_of_distance)

    def optional(name: str, num_rows: int) -> torch.Tensor | None:
        return tensor(f"{name}.weight", num_rows, width) if num_rows else None

    bias = distances = None
    if config.num_distance_buckets:
        table = tensor(f"{names.distance_bias}.weight", config.num_distance_buckets, config.num_heads)
        bias = table.T[:, _buckets(config.max_input_tokens, config.num_distance_buckets).to(device)].contiguous()
    if config.disentangled is not None:
        distances = tensor(f"{names.distances}.weight", 2 * config.disentangled.span, hidden)
        if config.disentangled.has_norm:
            distances = norm(names.distance_norm).normalize(distances)
    first_norm = f"{names.layers}.0.{names.attention_norm}"
    return TextEncoder(
        config,
        _operations(device),
        MlpActivation(config.activation, config.is_gated),
        tensor(f"{names.embedding}.weight", config.vocab_size, width),
        optional(names.positions, config.num_positions),
        optional(names.token_types, config.num_token_types),
        None if width == hidden else affine((names.projection,), (hidden,), width, False),
        norm(names.embedding_norm) if config.has_embedding_norm else None,
        norm(first_norm) if config.has_norms_before and names.has_first_norm else None,
        tuple(layer(index) for index in range(config.num_layers)),
        bias,
        _head(config, pooling, names, read, device),
    )


def _operations(device: torch.device) -> EncoderOperations:
    if device.type != "cuda":
        return TorchEncoderOperations()
    from services.dense_worker.encoders.text.triton_operations import TritonEncoderOperations

    return TritonEncoderOperations(device)


def _head(
    config: TextEncoderConfig, pooling: PoolingConfig, names: EncoderNames, read: Read, device: torch.device
) -> tuple[HeadLayer, ...]:
    """The layers after pooling, in float32."""

    def part(name: str, *shape: int) -> torch.Tensor:
        return read(name, shape).to(device, torch.float32)

    layers, size = list[HeadLayer](), config.hidden_size
    if pooling.head is not None:
        if not names.head:
            raise ModelError(f"classifiers of {config.family} with attention to all tokens are not supported")
        first, last = names.head
        is_modern = bool(names.head_norm)
        if is_modern or pooling.head is ClassifierHead.ENCODER:
            has_bias = not is_modern  # ModernBERT's is a field of its own, which says no in all published files
            bias = part(f"{first}.bias", size) if has_bias else None
            norm = None
            if is_modern:
                name, norm_bias = names.head_norm, None
                if config.norm is NormKind.LAYER:
                    norm_bias = Parameter(f"{name}.bias", part(f"{name}.bias", size))
                norm = LayerNorm(Parameter(f"{name}.weight", part(f"{name}.weight", size)), norm_bias, config.norm_eps)
            weights = Affine(part(f"{first}.weight", size, size), bias)
            layers.append(HeadLayer(weights, config.classifier_activation, norm))
        else:
            last = "classifier"  # it reads the states of tokens
        num_labels = len(pooling.labels)
        weights = Affine(part(f"{last}.weight", num_labels, size), part(f"{last}.bias", num_labels))
        layers.append(HeadLayer(weights, None))
    for stage in pooling.stages:
        with open_checkpoint(stage.path, lambda name: name) as checkpoint:
            weight = checkpoint.read("linear.weight", FLOATS, ((stage.out_features, size),)).float()
            bias = checkpoint.read("linear.bias", FLOATS, ((stage.out_features,),)).float() if stage.has_bias else None
        activation = None if stage.activation is PooledActivation.NONE else stage.activation.value
        layers.append(HeadLayer(Affine(weight.to(device), None if bias is None else bias.to(device)), activation))
        size = stage.out_features
    return tuple(layers)


def _buckets(max_length: int, num_buckets: int) -> torch.Tensor:
    """The bucket of each distance from 1 - max_length to max_length - 1 of a key behind its query: int64."""
    distances = torch.arange(1 - max_length, max_length)
    half = num_buckets // 2
    behind = (distances > 0).long() * half
    far = distances.abs()
    exact = half // 2
    ratio = (far.float() / exact).clamp(min=1.0).log() / math.log(MAX_DISTANCE / exact)
    large = (exact + (ratio * (half - exact)).long()).clamp(max=half - 1)
    return behind + torch.where(far < exact, far, large)


def disentangled_rows(terms: Disentangled, max_length: int) -> torch.Tensor:
    """The row of the table for each distance from 1 - max_length to max_length - 1 of a key behind its query: int64."""
    distances = -torch.arange(1 - max_length, max_length)  # of the query behind the key
    if terms.num_buckets:
        middle = terms.num_buckets // 2
        far = distances.abs().clamp(min=middle).float()
        logs = torch.log(far / middle) / torch.log(torch.tensor((terms.max_distance - 1) / middle)) * (middle - 1)
        buckets = (torch.ceil(logs) + middle).long() * distances.sign()
        distances = torch.where(distances.abs() <= middle, distances, buckets)
    return (distances + terms.span).clamp(0, 2 * terms.span - 1)


def load_token_heads(
    path: Path, pooling: PoolingConfig, hidden_size: int, device: torch.device
) -> dict[TokenHead, HeadLayer]:
    """The layers for the states of tokens, which are in files of their own in `path` (BGE-M3, arXiv:2402.03216).

    In float32. Raises `ModelError` for a tensor that is missing or of another shape.
    """
    heads = {}
    for head in pooling.token_heads:
        file, num_rows = path / f"{head.file_stem}.safetensors", _num_rows(head, hidden_size)
        with ExitStack() as opened:
            checkpoint = Checkpoint([file], opened, lambda name: name)
            parts = []
            for name, shape in (("weight", (num_rows, hidden_size)), ("bias", (num_rows,))):
                if name not in checkpoint:
                    raise ModelError(f"{file} has no tensor {name}")
                parts.append(checkpoint.read(name, FLOATS, (shape,)).to(device, torch.float32))
        heads[head] = HeadLayer(Affine(*parts), _ACTIVATIONS[head])
    return heads


def random_token_heads(
    pooling: PoolingConfig, hidden_size: int, device: torch.device, generator: torch.Generator
) -> dict[TokenHead, HeadLayer]:
    """Layers of the same shapes with random weights."""
    heads = {}
    for head in pooling.token_heads:
        num_rows = _num_rows(head, hidden_size)
        weight = torch.randn(num_rows, hidden_size, generator=generator) * hidden_size**-0.5
        heads[head] = HeadLayer(Affine(weight.to(device), torch.zeros(num_rows, device=device)), _ACTIVATIONS[head])
    return heads


def _num_rows(head: TokenHead, hidden_size: int) -> int:
    return 1 if head is TokenHead.SPARSE else hidden_size
