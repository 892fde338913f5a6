"""Builds the parts of latent attention. The matrix of keys and values is split by head, and never quantized here."""

from __future__ import annotations

import torch

from services.common.errors import ModelError
from services.common.families.shape import LatentAttention, NormKind
from services.common.quantization.schemes import BlockFp8Scheme, OnTheFlyFp8
from services.dense_worker.kernels.linear.quantized.block_fp8_weight import dequantized_source
from services.dense_worker.kernels.linear.quantized.layer import FLOATS, converted
from services.dense_worker.kernels.norm.norm import Norm
from services.dense_worker.model.builder import Builder
from services.dense_worker.model.latent.attention import LatentOutput, LatentQkv, LatentQueries
from services.dense_worker.model.layer import AfterAttention
from services.dense_worker.parameters import Loaded, Parameter, Source, StoredTensor

_EPS = 1e-6  # of the norms of latent vectors, whatever config.json says


def build_latent_qkv(layer: Builder, latent: LatentAttention) -> LatentQkv:
    """The half of a layer before attention."""
    config, names = layer.config, layer.names.of_latents
    query_size, queries = config.num_heads * (latent.plain_dim + latent.rotated_dim), None
    first = layer.projection(names.q, query_size)
    if latent.query_rank is not None:
        first = layer.projection(names.q_down, latent.query_rank)
        queries = LatentQueries(
            _latent_norm(layer, "query_latent_norm", names.q_norm, latent.query_rank),
            layer.linear("q_up", latent.query_rank, layer.projection(names.q_up, query_size)),
        )
    second = layer.projection(names.kv_down, latent.rank + latent.rotated_dim)
    return LatentQkv(
        layer.norm("input_norm", layer.names.attention_norm),
        layer.linear("qkv_down", config.hidden_size, first, second, has_bias=config.qkv_bias),
        queries,
        _latent_norm(layer, "latent_norm", names.kv_norm, latent.rank),
        _matrices(layer, latent, are_values=False),
        latent.rotated_dim,
    )


def build_latent_output(layer: Builder, latent: LatentAttention, after: AfterAttention) -> LatentOutput:
    """The half of a layer after attention; `after` begins with the output projection."""
    return LatentOutput(_matrices(layer, latent, are_values=True), after)


def _latent_norm(layer: Builder, name: str, stored: str, size: int) -> Norm:
    return layer.norm(name, stored, size, eps=_EPS, kind=NormKind.RMS)


def _matrices(layer: Builder, latent: LatentAttention, *, are_values: bool) -> Parameter:
    """The matrix of each head's keys, or of its values: rows of one matrix of the checkpoint, dequantized.

    Raises ModelError for a quantization from which they are not made.
    """
    num_heads, sizes = layer.config.num_heads, [latent.plain_dim, latent.value_dim]
    projection = layer.projection(layer.names.of_latents.kv_up, num_heads * sum(sizes))
    name = projection.name

    def of_heads(matrix: torch.Tensor) -> torch.Tensor:
        return matrix.unflatten(0, (num_heads, -1)).split(sizes, dim=1)[are_values]

    def convert(loaded: Loaded) -> torch.Tensor:
        return of_heads(loaded.tensor)

    scheme = layer.allocator.scheme_of(projection)
    if isinstance(scheme, BlockFp8Scheme):
        source: Source = dequantized_source(scheme, projection, latent.rank, num_heads, of_heads)
    elif scheme is None or isinstance(scheme, OnTheFlyFp8):
        stored = StoredTensor((f"{name}.weight",), FLOATS, ((projection.out_features, latent.rank),))
        source = converted(num_heads, convert, stored)
    else:
        raise ModelError(f"{name} is quantized as {scheme}, supported: unquantized, or FP8 in blocks")
    parameter = "latent_values" if are_values else "latent_keys"
    return layer.allocator.parameter(parameter, num_heads, sizes[are_values], latent.rank, sources=(source,))
