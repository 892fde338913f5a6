"""Multi-head latent attention with absorbed products (arXiv:2405.04434, section 2.1): its parts of the dense stroke.

The cache holds one latent vector c for each token. K c are the keys of a head and V c its values. Attention needs
q · (K c) = (Kᵀ q) · c, and sums of V c, which are V times the sums of c. So here queries are multiplied by Kᵀ, and the
output of attention by V: no key and no value of a head is ever computed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from services.dense_worker.kernels.linear.linear import Linear
from services.dense_worker.kernels.norm.norm import Norm
from services.dense_worker.model.layer import AfterAttention
from services.dense_worker.model.operations import Operations, Residual
from services.dense_worker.parameters import Parameter


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
