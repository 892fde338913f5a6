"""Multi-head latent attention with absorbed products (arXiv:2405.04434, section 2.1): its parts of the dense stroke.

The cache holds one latent vector c for each token. K c are the keys of a head and V c its values. Attention needs
q · (K c) = (Kᵀ q) · c, and sums of V c, which are V times the sums of c. So here queries are multiplied by Kᵀ, and the
output of attention by V: no key and no value of a head is ever computed. The matrix of keys and values is split by head
when it is loaded, and never quantized here.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from services.common.errors import ModelError
from services.common.families.shape import LatentAttention, NormKind
from services.common.quantization.schemes import BlockFp8Scheme, OnTheFlyFp8
from services.dense_worker.kernels.linear.linear import Linear
from services.dense_worker.kernels.linear.quantized.block_fp8_weight import dequantized_source
from services.dense_worker.kernels.linear.quantized.layer import FLOATS, converted
from services.dense_worker.kernels.norm.norm import Norm
from services.dense_worker.model.builder import Builder
from services.dense_worker.model.layer import AfterAttention
from services.dense_worker.model.operations import Operations, Residual
from services.dense_worker.parameters import Loaded, Parameter, Source, StoredTensor

_EPS = 1e-6  # of the norms of latent vectors, whatever config.json says


@dataclass(frozen=True, slots=True)
class LatentQueries:
    """Queries that are made of a latent vector of their own."""

    norm: Norm
    up: Linear  # [num_heads * (plain_dim + rotated_dim), query_rank]


@dataclass(frozen=True, slots=True)
class LatentQkv:
    """The half of a layer before attention. It ends with absorbed queries and one key for all heads.

    Each has its `rotated_dim` dimensions for the rotary embedding first, and then the `rank` latent ones.
    """

    norm: Norm
    down: Linear  # queries or their latent vectors, then the latent vector, then the shared rotated part of keys
    queries: LatentQueries | None  # None: `down` gives the queries
    latent_norm: Norm
    keys: Parameter  # [num_heads, plain_dim, rank]: K of each head
    rotated_dim: int

    def forward(
        self, operations: Operations, residual: Residual, qkv_out: torch.Tensor | None
    ) -> tuple[torch.Tensor, Residual]:
        """residual [n, hidden] -> qkv [n, qkv_size], in `qkv_out` where given, and the residual."""
        residual, down = operations.norm_linear(residual, self.norm, self.down)
        num_heads, plain_dim, rank = self.keys.data.shape
        query_size = self.down.out_features - rank - self.rotated_dim
        query, key = down.split([query_size, rank + self.rotated_dim], dim=1)
        if self.queries is not None:
            normed = Residual(self.queries.norm.normalize(query))
            query = operations.norm_linear(normed, None, self.queries.up)[1]
        query = query.unflatten(1, (num_heads, -1))
        head_dim = self.rotated_dim + rank
        if qkv_out is None:
            qkv_out = torch.empty(len(down), (num_heads + 1) * head_dim, dtype=down.dtype, device=down.device)
        heads = qkv_out.unflatten(1, (num_heads + 1, head_dim))
        operations.place_latent(heads, query, key, self.latent_norm)
        absorbed = heads[:, :-1, self.rotated_dim :].transpose(0, 1)
        torch.bmm(query[..., :plain_dim].transpose(0, 1), self.keys.data, out=absorbed)
        return qkv_out, residual


@dataclass(frozen=True, slots=True)
class LatentOutput:
    """The half of a layer after attention: values of the sums of latent vectors, and then as in any other layer."""

    values: Parameter  # [num_heads, value_dim, rank]: V of each head
    after: AfterAttention

    @property
    def attn_size(self) -> int:
        num_heads, _, rank = self.values.data.shape
        return num_heads * rank

    def forward(self, operations: Operations, attn_out: torch.Tensor, residual: Residual) -> Residual:
        """attn_out [n, num_heads * rank], residual [n, hidden] -> the layer's residual."""
        num_heads, value_dim, _ = self.values.data.shape
        sums = attn_out.unflatten(1, (num_heads, -1)).transpose(0, 1)
        values = torch.empty(len(attn_out), num_heads, value_dim, dtype=attn_out.dtype, device=attn_out.device)
        torch.bmm(sums, self.values.data.transpose(1, 2), out=values.transpose(0, 1))
        return self.after.forward(operations, values.flatten(1), residual)


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
