"""Builds the parts of latent attention. The matrix of keys and values is split by head, and never quantized here."""

from __future__ import annotations

import torch

from services.common.errors import ModelError
from services.common.families.names import CheckpointNames
from services.common.families.shape import LatentAttention
from services.common.model_config import ModelConfig
from services.common.quantization.schemes import BlockFp8Scheme, OnTheFlyFp8
from services.dense_worker.kernels.linear.linear import Cut, Projection
from services.dense_worker.kernels.linear.quantized.block_fp8_weight import dequantized_source
from services.dense_worker.kernels.linear.quantized.layer import FLOATS, converted
from services.dense_worker.model.allocator import WeightAllocator
from services.dense_worker.model.latent.attention import LatentOutput, LatentQkv, LatentQueries
from services.dense_worker.model.layer import AfterAttention
from services.dense_worker.parameters import Loaded, Parameter, Source, StoredTensor

_EPS = 1e-6  # of the norms of latent vectors, whatever config.json says


def build_latent_qkv(
    config: ModelConfig, latent: LatentAttention, allocator: WeightAllocator, names: CheckpointNames, layer: str
) -> LatentQkv:
    """The half of a layer before attention."""
    modules, num_heads = names.of_latents, config.num_heads
    query_size, queries = num_heads * (latent.plain_dim + latent.rotated_dim), None
    first = Projection(f"{layer}.{modules.q}", query_size)
    if latent.query_rank is not None:
        first = Projection(f"{layer}.{modules.q_down}", latent.query_rank)
        up = (Projection(f"{layer}.{modules.q_up}", query_size),)
        queries = LatentQueries(
            allocator.norm("query_latent_norm", f"{layer}.{modules.q_norm}", latent.query_rank, _EPS),
            allocator.linear("q_up", latent.query_rank, up, Cut.OUT, has_bias=False),
        )
    second = Projection(f"{layer}.{modules.kv_down}", latent.rank + latent.rotated_dim)
    norm = f"{layer}.{names.attention_norm}"
    return LatentQkv(
        allocator.norm("input_norm", norm, config.hidden_size, config.norm_eps, config.parts.norm),
        allocator.linear("qkv_down", config.hidden_size, (first, second), Cut.OUT, config.qkv_bias),
        queries,
        allocator.norm("latent_norm", f"{layer}.{modules.kv_norm}", latent.rank, _EPS),
        _matrices(config, latent, allocator, f"{layer}.{modules.kv_up}", are_values=False),
        latent.rotated_dim,
    )


def build_latent_output(
    config: ModelConfig,
    latent: LatentAttention,
    allocator: WeightAllocator,
    names: CheckpointNames,
    layer: str,
    after: AfterAttention,
) -> LatentOutput:
    """The half of a layer after attention; `after` begins with the output projection."""
    values = _matrices(config, latent, allocator, f"{layer}.{names.of_latents.kv_up}", are_values=True)
    return LatentOutput(values, after)


def _matrices(
    config: ModelConfig, latent: LatentAttention, allocator: WeightAllocator, name: str, *, are_values: bool
) -> Parameter:
    """The matrix of each head's keys, or of its values: rows of one matrix of the checkpoint, dequantized.

    Raises ModelError for a quantization from which they are not made.
    """
    num_heads, sizes = config.num_heads, [latent.plain_dim, latent.value_dim]
    projection = Projection(name, num_heads * sum(sizes))

    def of_heads(matrix: torch.Tensor) -> torch.Tensor:
        return matrix.unflatten(0, (num_heads, -1)).split(sizes, dim=1)[are_values]

    def convert(loaded: Loaded) -> torch.Tensor:
        return of_heads(loaded.tensor)

    scheme = allocator.scheme_of(projection)
    if isinstance(scheme, BlockFp8Scheme):
        source: Source = dequantized_source(scheme, projection, latent.rank, num_heads, of_heads)
    elif scheme is None or isinstance(scheme, OnTheFlyFp8):
        stored = StoredTensor((f"{name}.weight",), FLOATS, ((projection.out_features, latent.rank),))
        source = converted(num_heads, convert, stored)
    else:
        raise ModelError(f"{name} is quantized as {scheme}, supported: unquantized, or FP8 in blocks")
    parameter = "latent_values" if are_values else "latent_keys"
    return allocator.parameter(parameter, num_heads, sizes[are_values], latent.rank, sources=(source,))
