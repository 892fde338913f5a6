"""Loads a `TextEncoder` from safetensors, or makes one with random weights."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from services.common.encoders.encoder_config import TextEncoderConfig
from services.common.errors import ModelError
from services.common.pooling.pooling_config import ClassifierHead, PooledActivation, PoolingConfig
from services.dense_worker.encoders.text.text_encoder import Affine, EncoderNorm, HeadLayer, LayerWeights, TextEncoder
from services.dense_worker.kernels.linear.quantized.layer import FLOATS
from services.dense_worker.model.checkpoint import open_checkpoint

MAX_DISTANCE = 128  # from which on all distances have the same bias (MPNet, as T5 in arXiv:1910.10683)

# The float32 tensor of a name and shape, on the CPU.
Read = Callable[[str, tuple[int, ...]], torch.Tensor]


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
    up: str = "intermediate.dense"
    down: str = "output.dense"
    mlp_norm: str = "output.LayerNorm"
    distance_bias: str = "encoder.relative_attention_bias"
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
        up="ffn.lin1",
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
        up="mlp.Wi",
        down="mlp.Wo",
        mlp_norm="mlp_norm",
        head_norm="head.norm",
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
    return encoder


def random_encoder(
    config: TextEncoderConfig, pooling: PoolingConfig, dtype: torch.dtype, device: torch.device, seed: int
) -> TextEncoder:
    """Random weights of standard deviation 0.02; those of norms are 1. The same seed gives the same."""
    generator = torch.Generator().manual_seed(seed)

    def make(name: str, shape: tuple[int, ...]) -> torch.Tensor:
        if "norm" in name.lower() and name.endswith(".weight"):
            return torch.ones(shape)
        return torch.randn(shape, generator=generator) * 0.02

    return _build(config, pooling, NAMES[config.family], make, dtype, device)


def _build(
    config: TextEncoderConfig,
    pooling: PoolingConfig,
    names: EncoderNames,
    read: Read,
    dtype: torch.dtype,
    device: torch.device,
) -> TextEncoder:
    hidden, intermediate = config.hidden_size, config.intermediate_size

    def tensor(name: str, *shape: int) -> torch.Tensor:
        return read(name, shape).to(device, dtype)

    def norm(name: str, dtype: torch.dtype = dtype) -> EncoderNorm:
        weight, bias = (
            read(f"{name}.{each}", (hidden,)).to(device, dtype) if is_there else None
            for each, is_there in (("weight", True), ("bias", config.has_norm_bias))
        )
        assert weight is not None, "every norm has a weight"
        return EncoderNorm(weight, bias, config.norm_eps)

    def affine(modules: tuple[str, ...], num_rows: int, num_columns: int, has_bias: bool) -> Affine:
        size = num_rows // len(modules)
        weight = torch.cat([tensor(f"{module}.weight", size, num_columns) for module in modules])
        bias = torch.cat([tensor(f"{module}.bias", size) for module in modules]) if has_bias else None
        return Affine(weight, bias)

    def layer(index: int) -> LayerWeights:
        base = f"{names.layers}.{index}."
        has_norm = index > 0 or not config.has_norms_before
        num_up = (1 + config.is_gated) * intermediate
        return LayerWeights(
            affine(tuple(base + name for name in names.qkv), 3 * hidden, hidden, config.has_attention_bias),
            affine((base + names.o,), hidden, hidden, config.has_attention_bias),
            norm(base + names.attention_norm) if has_norm else None,
            affine((base + names.up,), num_up, hidden, config.has_mlp_bias),
            affine((base + names.down,), hidden, intermediate, config.has_mlp_bias),
            norm(base + names.mlp_norm),
        )

    def optional(name: str, num_rows: int) -> torch.Tensor | None:
        return tensor(f"{name}.weight", num_rows, hidden) if num_rows else None

    bias = None
    if config.num_distance_buckets:
        table = tensor(f"{names.distance_bias}.weight", config.num_distance_buckets, config.num_heads)
        bias = table.T[:, _buckets(config.max_input_tokens, config.num_distance_buckets).to(device)].contiguous()
    return TextEncoder(
        config,
        tensor(f"{names.embedding}.weight", config.vocab_size, hidden),
        optional(names.positions, config.num_positions),
        optional(names.token_types, config.num_token_types),
        norm(names.embedding_norm),
        tuple(layer(index) for index in range(config.num_layers)),
        norm(names.final_norm) if config.has_norms_before else None,
        bias,
        _head(config, pooling, names, read, device),
    )


def _head(
    config: TextEncoderConfig, pooling: PoolingConfig, names: EncoderNames, read: Read, device: torch.device
) -> tuple[HeadLayer, ...]:
    """The layers after pooling, in float32."""

    def part(name: str, *shape: int) -> torch.Tensor:
        return read(name, shape).to(device, torch.float32)

    layers, size = list[HeadLayer](), config.hidden_size
    if pooling.head is ClassifierHead.ENCODER:
        first, last = names.head
        is_modern = bool(names.head_norm)
        has_bias = not is_modern  # ModernBERT's is a field of its own, which says no in all published files
        bias = part(f"{first}.bias", size) if has_bias else None
        norm = None
        if is_modern:
            norm_bias = part(f"{names.head_norm}.bias", size) if config.has_norm_bias else None
            norm = EncoderNorm(part(f"{names.head_norm}.weight", size), norm_bias, config.norm_eps)
        layers.append(HeadLayer(Affine(part(f"{first}.weight", size, size), bias), config.classifier_activation, norm))
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
