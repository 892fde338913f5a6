"""Builds an encoder from its config and the names in its family's checkpoints."""

from __future__ import annotations

import math

import torch

from services.common.families.shape import EncoderConfig, LayerHeads, ResidualKind, SinusoidalPositions
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
from services.dense_worker.kernels.linear.activation import MlpActivation
from services.dense_worker.kernels.linear.linear import Cut, Linear
from services.dense_worker.model.allocator import WeightAllocator
from services.dense_worker.model.builder import Builder
from services.dense_worker.model.layer import DecoderLayer, NormedQkv, NormedResidual, SequentialResidual
from services.dense_worker.model.mlp import ActivatedMlp
from services.dense_worker.parameters import Conversion, Parameter, Source

_BASE = 10000.0  # of the frequencies of positions


def build_source_encoder(model: Builder, encoder: EncoderConfig, table: Parameter) -> SourceEncoder:
    """The encoder. `table`: the decoder's embedding, which it mostly shares."""
    body: Body
    if encoder.swin is not None:
        body = build_swin_encoder(encoder.swin, model.allocator)
    else:
        body = build_sequence_encoder(model, encoder, table)
        if encoder.pictures is not None:
            tower = build_blip2_tower(encoder.pictures.tower, model.allocator)
            body = PictureTokenEncoder(body, tower, encoder.pictures)
    return SourceEncoder(body, tuple(_build_cross_kv(model, layer) for layer in model.config.cross_layers))


def build_sequence_encoder(model: Builder, encoder: EncoderConfig, table: Parameter) -> SequenceEncoder:
    """What reads tokens or sound."""
    config, page = model.config, model.names.of_encoder
    biases = None
    if config.attention.relative_bias is not None:
        num_buckets = config.attention.relative_bias.num_buckets
        biases = model.parameter("relative_bias", page.relative_bias, num_buckets, encoder.num_heads)
    attention = EncoderAttention(
        encoder.num_heads, encoder.head_dim, config.attention.scale, config.attention.relative_bias, biases
    )
    norm = model.norm("encoder_norm", page.final_norm) if encoder.has_final_norm else None
    rows = build_sound_rows(model, encoder) if encoder.num_mel_bins else build_token_rows(model, encoder, table)
    return SequenceEncoder(
        rows, attention, tuple(_build_layer(model, encoder, layer) for layer in range(encoder.num_layers)), norm
    )


def build_token_rows(model: Builder, encoder: EncoderConfig, table: Parameter) -> TokenRows:
    """What makes rows of tokens."""
    page, parts, hidden = model.names.of_encoder, model.config.parts, model.config.hidden_size
    own = Parameter("source_embed", table.data)
    if encoder.has_own_embedding:
        own = model.parameter("source_embed", f"{page.embedding}.weight", encoder.vocab_size, hidden)
    positions = None
    if parts.sinusoidal_positions is not None:
        positions = sinusoidal_table(
            "source_positions", parts.sinusoidal_positions, encoder.max_source_len, hidden, model.allocator
        )
    elif encoder.num_learned_positions:
        num_rows = encoder.num_learned_positions + parts.learned_position_offset
        positions = model.parameter("source_positions", f"{page.positions}.weight", num_rows, hidden)
    norm = model.norm("source_embedding_norm", page.embedding_norm) if parts.has_embedding_norm else None
    offset = 0 if parts.sinusoidal_positions is not None else parts.learned_position_offset
    return TokenRows(own, model.rounded(parts.embedding_multiplier), positions, offset, norm)


def build_sound_rows(model: Builder, encoder: EncoderConfig) -> SoundRows:
    """What makes rows of log-mel features."""
    page, hidden = model.names.of_encoder, model.config.hidden_size
    first, second = page.convolutions
    return SoundRows(
        model.parameter("convolution_1", f"{first}.weight", hidden, encoder.num_mel_bins, 3),
        model.parameter("convolution_1_bias", f"{first}.bias", hidden),
        model.parameter("convolution_2", f"{second}.weight", hidden, hidden, 3),
        model.parameter("convolution_2_bias", f"{second}.bias", hidden),
        model.parameter("source_positions", f"{page.positions}.weight", encoder.num_learned_positions, hidden),
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


def _build_layer(model: Builder, encoder: EncoderConfig, index: int) -> DecoderLayer:
    config, names, page = model.config, model.names, model.names.of_encoder
    layer, parts, hidden = model.of_layer(f"{page.layers}.{index}"), config.parts, config.hidden_size
    heads = LayerHeads(encoder.num_heads, encoder.num_heads, encoder.head_dim)
    qkv = layer.allocator.attention_projections(
        "qkv",
        hidden,
        tuple(layer.projection(name, heads.q_size) for name in names.qkv),
        has_bias=config.qkv_bias,
        has_key_bias=parts.has_key_bias,
    )
    o = layer.linear("o", heads.attn_size, layer.projection(names.o, hidden), cut=Cut.IN, has_bias=config.o_bias)
    input_norm, mlp_norm = layer.norm("input_norm", names.attention_norm), layer.norm("post_norm", page.mlp_norm)
    intermediate = encoder.intermediate_size
    merged = [layer.projection(name, intermediate) for name in page.mlp_in]
    down = layer.projection(page.down, hidden)
    first = layer.linear("gate_up" if parts.is_gated else "up", hidden, *merged, has_bias=config.mlp_bias)
    last = layer.linear("down", intermediate, down, cut=Cut.IN, has_bias=config.mlp_bias)
    has_norms_before = parts.residual is not ResidualKind.NORMED
    activation = MlpActivation(parts.activation, parts.is_gated)
    mlp = ActivatedMlp(mlp_norm if has_norms_before else None, first, last, activation)
    if has_norms_before:
        return DecoderLayer(NormedQkv(input_norm, qkv, None), SequentialResidual(o, mlp))
    return DecoderLayer(NormedQkv(None, qkv, None), NormedResidual(o, input_norm, mlp, mlp_norm))


def _build_cross_kv(model: Builder, index: int) -> Linear:
    """The projection to keys and values of a layer of the decoder, counted as in `ModelConfig`."""
    config, names = model.config, model.names
    layer, size = model.of_layer(f"{names.layers}.{index // 2}"), config.layer_heads[index].source_size // 2
    return layer.allocator.attention_projections(
        "cross_kv",
        config.hidden_size,
        tuple(layer.projection(name, size) for name in names.of_encoder.cross_qkv[1:]),
        has_bias=config.qkv_bias,
        has_key_bias=config.parts.has_key_bias,
        key_index=0,
    )
