"""Builds an encoder from its config and the names in its family's checkpoints."""

from __future__ import annotations

import math

import torch

from services.common.families.names import CheckpointNames
from services.common.families.shape import EncoderConfig, LayerHeads, ResidualKind, SinusoidalPositions
from services.common.model_config import ModelConfig
from services.dense_worker.encoders.source.picture_tokens import PictureTokenEncoder
from services.dense_worker.encoders.source.source_encoder import (
    Body,
    EncoderAttention,
    SequenceEncoder,
    SoundRows,
    SourceEncoder,
    TokenRows,
)
from services.dense_worker.encoders.source.swin_encoder import build_swin_encoder
from services.dense_worker.encoders.vision.blip2 import build_blip2_tower
from services.dense_worker.kernels.linear.linear import Cut, Linear, Projection
from services.dense_worker.model.allocator import WeightAllocator
from services.dense_worker.model.layer import DecoderLayer, NormedQkv, NormedResidual, SequentialResidual
from services.dense_worker.model.mlp import GatedMlp, PlainMlp
from services.dense_worker.parameters import Conversion, Parameter, Source

_BASE = 10000.0  # of the frequencies of positions


def build_source_encoder(
    config: ModelConfig, encoder: EncoderConfig, allocator: WeightAllocator, names: CheckpointNames, table: Parameter
) -> SourceEncoder:
    """The encoder. `table`: the decoder's embedding, which it mostly shares."""
    body: Body
    if encoder.swin is not None:
        body = build_swin_encoder(encoder.swin, allocator)
    else:
        body = build_sequence_encoder(config, encoder, allocator, names, table)
        if encoder.pictures is not None:
            tower = build_blip2_tower(encoder.pictures.tower, allocator)
            body = PictureTokenEncoder(body, tower, encoder.pictures)
    return SourceEncoder(body, tuple(_build_cross_kv(config, allocator, names, layer) for layer in config.cross_layers))


def build_sequence_encoder(
    config: ModelConfig, encoder: EncoderConfig, allocator: WeightAllocator, names: CheckpointNames, table: Parameter
) -> SequenceEncoder:
    """What reads tokens or sound."""
    page, parts, hidden = names.of_encoder, config.parts, config.hidden_size
    biases = None
    if config.attention.relative_bias is not None:
        shape = (config.attention.relative_bias.num_buckets, encoder.num_heads)
        biases = allocator.parameter("relative_bias", *shape, sources=(Source(page.relative_bias, shape[0]),))
    attention = EncoderAttention(
        encoder.num_heads, encoder.head_dim, config.attention.scale, config.attention.relative_bias, biases
    )
    norm = None
    if encoder.has_final_norm:
        norm = allocator.norm("encoder_norm", page.final_norm, hidden, config.norm_eps, parts.norm)
    make_rows = build_sound_rows if encoder.num_mel_bins else build_token_rows
    return SequenceEncoder(
        make_rows(config, encoder, allocator, names, table),
        attention,
        tuple(_build_layer(config, encoder, allocator, names, layer) for layer in range(encoder.num_layers)),
        norm,
    )


def build_token_rows(
    config: ModelConfig, encoder: EncoderConfig, allocator: WeightAllocator, names: CheckpointNames, table: Parameter
) -> TokenRows:
    """What makes rows of tokens."""
    page, parts, hidden = names.of_encoder, config.parts, config.hidden_size
    own = Parameter("source_embed", table.data)
    if encoder.has_own_embedding:
        sources = (Source(f"{page.embedding}.weight", encoder.vocab_size),)
        own = allocator.parameter("source_embed", encoder.vocab_size, hidden, sources=sources)
    positions = None
    if parts.sinusoidal_positions is not None:
        positions = sinusoidal_table(
            "source_positions", parts.sinusoidal_positions, encoder.max_source_len, hidden, allocator
        )
    elif encoder.num_learned_positions:
        num_rows = encoder.num_learned_positions + parts.learned_position_offset
        sources = (Source(f"{page.positions}.weight", num_rows),)
        positions = allocator.parameter("source_positions", num_rows, hidden, sources=sources)
    norm = None
    if parts.has_embedding_norm:
        norm = allocator.norm("source_embedding_norm", page.embedding_norm, hidden, config.norm_eps, parts.norm)
    multiplier = torch.tensor(parts.embedding_multiplier, dtype=allocator.dtype).item()
    offset = 0 if parts.sinusoidal_positions is not None else parts.learned_position_offset
    return TokenRows(own, multiplier, positions, offset, norm)


def build_sound_rows(
    config: ModelConfig, encoder: EncoderConfig, allocator: WeightAllocator, names: CheckpointNames, table: Parameter
) -> SoundRows:
    """What makes rows of log-mel features; `table` has no part in it."""
    page, hidden = names.of_encoder, config.hidden_size

    def tensor(name: str, stored: str, *shape: int) -> Parameter:
        return allocator.parameter(name, *shape, sources=(Source(stored, shape[0]),))

    first, second = page.convolutions
    return SoundRows(
        tensor("convolution_1", f"{first}.weight", hidden, encoder.num_mel_bins, 3),
        tensor("convolution_1_bias", f"{first}.bias", hidden),
        tensor("convolution_2", f"{second}.weight", hidden, hidden, 3),
        tensor("convolution_2_bias", f"{second}.bias", hidden),
        tensor("source_positions", f"{page.positions}.weight", encoder.num_learned_positions, hidden),
    )


def sinusoidal_table(
    name: str, kind: SinusoidalPositions, num_positions: int, hidden: int, allocator: WeightAllocator
) -> Parameter:
    """Sines, then cosines, of positions: [num_positions, hidden]. No tensor of a checkpoint fills it."""

    def compute() -> torch.Tensor:
        num_frequencies = hidden // 2
        divisor = num_frequencies - 1 if kind.reaches_base else num_frequencies
        frequencies = torch.exp(torch.arange(num_frequencies, dtype=torch.float64) * (-math.log(_BASE) / divisor))
        positions = torch.arange(num_positions, dtype=torch.float64) + kind.first_row
        angles = positions[:, None] * frequencies
        return torch.cat((angles.sin(), angles.cos()), dim=1).to(allocator.dtype)

    sources = (Source(name, num_positions, Conversion((), compute)),)
    return allocator.parameter(name, num_positions, hidden, sources=sources)


def _build_layer(
    config: ModelConfig, encoder: EncoderConfig, allocator: WeightAllocator, names: CheckpointNames, index: int
) -> DecoderLayer:
    page, parts, hidden, eps = names.of_encoder, config.parts, config.hidden_size, config.norm_eps
    layer = f"{page.layers}.{index}"
    heads = LayerHeads(encoder.num_heads, encoder.num_heads, encoder.head_dim)
    qkv = allocator.attention_projections(
        "qkv",
        hidden,
        tuple(Projection(f"{layer}.{name}", heads.q_size) for name in names.qkv),
        has_bias=config.qkv_bias,
        has_key_bias=parts.has_key_bias,
    )
    o = allocator.linear("o", heads.attn_size, (Projection(f"{layer}.{names.o}", hidden),), Cut.IN, config.o_bias)
    input_norm, mlp_norm = (
        allocator.norm(name, f"{layer}.{stored}", hidden, eps, parts.norm)
        for name, stored in (("input_norm", names.attention_norm), ("post_norm", page.mlp_norm))
    )
    intermediate = encoder.intermediate_size
    merged = tuple(Projection(f"{layer}.{name}", intermediate) for name in page.mlp_in)
    name = "gate_up" if parts.is_gated else "up"
    first = allocator.linear(name, hidden, merged, Cut.OUT, config.mlp_bias)
    down = (Projection(f"{layer}.{page.down}", hidden),)
    last = allocator.linear("down", intermediate, down, Cut.IN, config.mlp_bias)
    has_norms_before = parts.residual is not ResidualKind.NORMED
    mlp = (GatedMlp if parts.is_gated else PlainMlp)(
        mlp_norm if has_norms_before else None, first, last, parts.activation
    )
    if has_norms_before:
        return DecoderLayer(NormedQkv(input_norm, qkv, None), SequentialResidual(o, mlp))
    return DecoderLayer(NormedQkv(None, qkv, None), NormedResidual(o, input_norm, mlp, mlp_norm))


def _build_cross_kv(config: ModelConfig, allocator: WeightAllocator, names: CheckpointNames, layer: int) -> Linear:
    """The projection to keys and values of a layer of the decoder, counted as in `ModelConfig`."""
    size = config.layer_heads[layer].source_size // 2
    prefix = f"{names.layers}.{layer // 2}"
    merged = tuple(Projection(f"{prefix}.{name}", size) for name in names.of_encoder.cross_qkv[1:])
    return allocator.attention_projections(
        "cross_kv",
        config.hidden_size,
        merged,
        has_bias=config.qkv_bias,
        has_key_bias=config.parts.has_key_bias,
        key_index=0,
    )
