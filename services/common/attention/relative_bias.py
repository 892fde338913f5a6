"""The buckets of distances of T5's relative bias (arXiv:1910.10683, section 2.1)."""

from __future__ import annotations

import math

import torch

from services.common.families.shape import RelativeBias


def causal_buckets(bias: RelativeBias, num_distances: int, device: torch.device | None = None) -> torch.Tensor:
    """The bucket of a key that lies 0, 1, ... tokens before the query: int64 [num_distances]."""
    return _buckets(torch.arange(num_distances), bias.num_buckets, bias.max_distance).to(device)


def two_sided_buckets(bias: RelativeBias, length: int) -> torch.Tensor:
    """The bucket of a key that lies 1 - length to length - 1 tokens behind the query: int64 [2 * length - 1].

    The first half of the buckets is for keys before the query and for the query itself.
    """
    behind, num_own = torch.arange(1 - length, length), bias.num_buckets // 2
    return _buckets(behind.abs(), num_own, bias.max_distance) + num_own * (behind > 0)


def _buckets(distances: torch.Tensor, num_buckets: int, max_distance: int) -> torch.Tensor:
    """distances: int64, at least 0. One bucket each for the smaller half, then logarithmically wider ones."""
    num_exact = num_buckets // 2
    growth = torch.log(distances.clamp(min=1).float() / num_exact) / math.log(max_distance / num_exact)
    wider = (num_exact + (growth * (num_buckets - num_exact)).long()).clamp(max=num_buckets - 1)
    return torch.where(distances < num_exact, distances, wider)
