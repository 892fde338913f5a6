"""Norms, of tokens and of attention heads."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from services.dense_worker.model.parameters import Parameter


@dataclass(frozen=True, slots=True)
class RmsNorm:
    """RMSNorm over the last dimension (Zhang & Sennrich, 2019), in float32, rounded to x's dtype before the weight."""

    weight: Parameter  # [size]
    eps: float

    def normalize(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., size] -> the same shape and dtype."""
        wide = x.float()
        normed = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + self.eps)
        return self.weight.data * normed.to(x.dtype)


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """RMSNorm of each q head and each k head, after the projection."""

    q: RmsNorm  # over head_dim
    k: RmsNorm
    num_heads: int
    num_kv_heads: int

    @property
    def head_dim(self) -> int:
        return len(self.q.weight.data)
