"""Norms, of tokens and of attention heads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch.nn import functional as F

from services.dense_worker.parameters import Parameter

_TILE_SIZE = 64  # features of a tile, or fewer


class Norm(Protocol):
    """A norm over the last dimension."""

    weight: Parameter  # [size], or [num_heads, size] for heads with their own weights
    eps: float

    def normalize(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., size] -> the same shape and dtype, by torch: the reference for kernels."""


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
class RmsNormPlusOne:
    """RMSNorm with the factor 1 + weight, all in float32 and rounded at the end (Gemma)."""

    weight: Parameter  # [size]
    eps: float

    def normalize(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., size] -> the same shape and dtype."""
        wide = x.float()
        normed = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + self.eps)
        return (normed * (self.weight.data.float() + 1.0)).to(x.dtype)


@dataclass(frozen=True, slots=True)
class UnweightedRmsNorm:
    """RMSNorm over the last dimension without a weight, in float32, rounded at the end (the v heads of Gemma 4)."""

    eps: float

    def normalize(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., size] -> the same shape and dtype."""
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + self.eps)).to(x.dtype)


@dataclass(frozen=True, slots=True)
class LayerNorm:
    """LayerNorm over the last dimension (arXiv:1607.06450), in float32, rounded at the end."""

    weight: Parameter  # [size], or [num_heads, size]
    bias: Parameter | None  # [size]
    eps: float

    def normalize(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., size] -> the same shape and dtype."""
        weight = self.weight.data
        bias = None if self.bias is None else self.bias.data
        if weight.dim() == 1:
            return F.layer_norm(x, weight.shape, weight, bias, self.eps)
        assert bias is None, "norms of heads have no bias"
        wide = x.float()
        centred = wide - wide.mean(dim=-1, keepdim=True)
        normed = centred * torch.rsqrt(centred.square().mean(dim=-1, keepdim=True) + self.eps)
        return (normed * weight.float()).to(x.dtype)


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """Norms of q and k, after the projection. Each normalises its heads one by one, or all heads as if one."""

    q: Norm
    k: Norm | None  # None: the layer has no keys and values of its own
    num_heads: int  # 1 if the norm covers all heads together
    num_kv_heads: int
    v: UnweightedRmsNorm | None = None  # of each v head, which is as wide as a k head

    @property
    def cover_all_heads(self) -> bool:
        """Whether q and k are each normalised as one vector."""
        return self.num_heads == 1 and self.v is None

    @property
    def sizes(self) -> tuple[int, ...]:
        """The widths of q, k and v; of q alone if the layer has no others."""
        q_size = self.num_heads * self.q.weight.data.shape[-1]
        if self.k is None:
            return (q_size,)
        kv_size = self.num_kv_heads * self.k.weight.data.shape[-1]
        return (q_size, kv_size, kv_size)

    def normalize(self, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """q, k and v, [n, width] each, or q alone -> the same shapes; v itself if it has no norm."""
        of_parts = (self.q, self.num_heads), (self.k, self.num_kv_heads), (self.v, self.num_kv_heads)
        return [
            part if norm is None else norm.normalize(part.view(-1, count, size // count)).view(-1, size)
            for part, size, (norm, count) in zip(parts, self.sizes, of_parts, strict=False)
        ]


@dataclass(frozen=True, slots=True)
class SplitNorm:
    """An RMSNorm of n rows between two products of few rows, computed by these. A kernel of its own takes 2 µs.

    The product that adds to the residual also stores the residual times the norm's weight, and sums of the squares of
    its features (`rows` and `squares`). The next product multiplies those rows, and its own sums by the norm's factor
    of each row. So the normalised row is rounded once, where the norm itself rounds twice.
    """

    weight: torch.Tensor  # [size]
    eps: float
    rows: torch.Tensor  # [n, size], contiguous: the residual times `weight`
    squares: torch.Tensor  # float32 [64, num_squares(size)], one for each tile of a row; zeros behind them


def num_squares(size: int) -> int:
    """Columns of `SplitNorm.squares`, and the most tiles."""
    return -(-size // _TILE_SIZE**2) * _TILE_SIZE
