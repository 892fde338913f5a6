"""`SharedHeadNorms`: norms of q and k that cover the heads of all ranks, of which each has some."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from services.dense_worker.kernels.norm.norm import HeadNorms, RmsNorm
from services.dense_worker.ranks.group import RankGroup


@dataclass(frozen=True, slots=True)
class SharedHeadNorms(HeadNorms):
    """The weights are the rank's parts. Each rank adds the squares of its own heads to those of all."""

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
