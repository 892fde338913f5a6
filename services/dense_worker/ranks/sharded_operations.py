"""`ShardedOperations`: the operations of one rank's shards, in torch, and what is added up over the ranks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional as F

from services.dense_worker.kernels.experts.routed_experts import RoutedExperts
from services.dense_worker.kernels.linear.linear import Cut, Linear
from services.dense_worker.kernels.lora.tensors import LoraStore
from services.dense_worker.kernels.norm.norm import HeadNorms, Norm, RmsNorm
from services.dense_worker.model.operations import Residual
from services.dense_worker.model.torch_operations import TorchOperations
from services.dense_worker.parameters import Parameter
from services.dense_worker.ranks.group import RankGroup


@dataclass(frozen=True, slots=True)
class SharedHeadNorms(HeadNorms):
    """Norms of q and k that cover the heads of all ranks, of which each has some: the weights are the rank's parts.

    Each rank adds the squares of its own heads to those of all.
    """

    whole_sizes: tuple[int, int] = (0, 0)  # the widths of q and of k, with the heads of all ranks
    num_kv_copies: int = 1  # ranks that hold the same heads of keys

    def normalize_over(self, group: RankGroup, qkv: torch.Tensor, is_in_place: bool) -> torch.Tensor:
        """qkv [n, qkv_size] of the rank with q and k normalised, itself or a copy. Raises as `RankGroup.add` does."""
        qkv = qkv if is_in_place else qkv.clone()
        q, k, *_ = qkv.split(self.sizes, dim=1)
        squares = torch.stack([q.float().square().sum(1), k.float().square().sum(1) / self.num_kv_copies])
        group.add(squares)
        for part, norm, total, size in zip((q, k), (self.q, self.k), squares, self.whole_sizes, strict=True):
            assert type(norm) is RmsNorm, "no family has another one over all heads"
            normed = part.float() * torch.rsqrt(total / size + norm.eps)[:, None]
            part.copy_(norm.weight.data * normed.to(part.dtype))
        return qkv


class ShardedOperations(TorchOperations):
    """Every rank has the whole residual, and gets the same one from each operation that changes it."""

    def __init__(self, vocab_size: int, lora: LoraStore | None = None) -> None:
        super().__init__(lora)
        self._vocab_size = vocab_size
        self._group: RankGroup | None = None

    @property
    def group(self) -> RankGroup:
        """The ranks of the present attachment."""
        assert self._group is not None, "a rank has an attachment before it runs a step"
        return self._group

    def use_group(self, group: RankGroup) -> None:
        """Later steps run with these ranks."""
        self._group = group

    def share_tokens(self, token_ids: torch.Tensor) -> None:
        """Gives all ranks the tokens of the first one."""
        self.group.broadcast(token_ids)

    def linear(self, linear: Linear, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """The rank's columns of the product, or the whole product if the layer is cut by its in_features.

        The deltas of adapters are parts of the sum, as the products are.
        """
        product = super().linear(linear, x, out)
        if linear.cut is Cut.IN:
            self.group.add(product)
        return product

    def embed(self, table: Parameter, token_ids: torch.Tensor) -> Residual:
        """Each row is that of the one rank that has the token."""
        own = token_ids - self.group.rank.index * len(table.data)
        is_elsewhere = (own < 0) | (own >= len(table.data))
        hidden = F.embedding(own.masked_fill(is_elsewhere, 0), table.data)
        hidden.masked_fill_(is_elsewhere[:, None], 0.0)
        self.group.add(hidden)
        return Residual(hidden)

    def norm_heads(self, qkv: torch.Tensor, norms: HeadNorms, is_in_place: bool) -> torch.Tensor:
        """Those that cover all heads need the squares of all ranks."""
        if isinstance(norms, SharedHeadNorms):
            return norms.normalize_over(self.group, qkv, is_in_place)
        return super().norm_heads(qkv, norms, is_in_place)

    def mix_experts(
        self,
        x: torch.Tensor,
        experts: RoutedExperts,
        shared: torch.Tensor | None,
        routed_by: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """All ranks choose the same experts and have parts of each; `shared` is whole already."""
        total = experts.mix(x, routed_by)
        self.group.add(total)
        return (total if shared is None else total.add_(shared)).to(x.dtype)

    def logits(
        self, residual: Residual, norm: Norm | None, lm_head: Linear, hidden_out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Those of all ranks, on the first one, contiguous: what edits them takes them as one row."""
        own = super().logits(residual, norm, lm_head, hidden_out)
        return self.group.gather(own)[:, : self._vocab_size].contiguous()
