"""`Router`: chooses the experts of each token."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch.nn import functional as F

from services.common.families.shape import GroupedRouting
from services.dense_worker.kernels.norm.norm import UnweightedRmsNorm
from services.dense_worker.parameters import Parameter


class Router(Protocol):
    """Chooses experts by a product with each token."""

    weight: Parameter  # [num_experts, hidden]
    bias: Parameter | None  # [num_experts]
    num_per_token: int
    renormalizes: bool

    def choose(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """x [n, hidden] -> the chosen experts, int64 [n, num_per_token], and their weights, float32 of that shape."""


@dataclass(frozen=True, slots=True)
class SoftmaxRouter:
    """Chooses the experts with the greatest softmax of their logits, which is their weight."""

    weight: Parameter  # [num_experts, hidden], in the model's dtype in every checkpoint
    num_per_token: int
    renormalizes: bool
    bias: Parameter | None = None  # [num_experts]

    def choose(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """x [n, hidden] -> the chosen experts, int64 [n, num_per_token], and their weights, float32 of that shape."""
        bias = None if self.bias is None else self.bias.data
        scores = F.linear(x, self.weight.data, bias).softmax(dim=-1, dtype=torch.float32)
        weights, experts = scores.topk(self.num_per_token, dim=-1)
        return experts, weights / weights.sum(dim=-1, keepdim=True) if self.renormalizes else weights


@dataclass(frozen=True, slots=True)
class SparseMixer:
    """Chooses experts one after the other, the one with the greatest logit first: see `ExpertOptions.mixer_jitter`."""

    weight: Parameter  # [num_experts, hidden], in the model's dtype in every checkpoint
    num_per_token: int
    jitter: float
    bias: None = None
    renormalizes: bool = False

    def choose(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """x [n, hidden] -> the chosen experts, int64 [n, num_per_token], and their weights, float32 of that shape."""
        logits = F.linear(x, self.weight.data).float()
        left, chosen, weights = logits, [], []
        for _ in range(self.num_per_token):
            best, expert = left.max(dim=-1, keepdim=True)
            is_far = (best - logits) / torch.maximum(logits.abs(), best) > 2 * self.jitter
            weights.append(left.masked_fill(is_far, -math.inf).softmax(dim=-1).gather(1, expert))
            chosen.append(expert)
            left = left.scatter(1, expert, -math.inf)
        return torch.cat(chosen, dim=1), torch.cat(weights, dim=1)


@dataclass(frozen=True, slots=True)
class ScaledRouter:
    """Normalises and scales the token first, and then chooses as `SoftmaxRouter`; each expert's weight has a factor."""

    weight: Parameter  # [num_experts, hidden], in the model's dtype in every checkpoint
    num_per_token: int
    scale: Parameter  # [hidden], of the token
    expert_scale: Parameter  # [num_experts], of the weights after they add up to 1
    norm: UnweightedRmsNorm
    bias: None = None
    renormalizes: bool = True

    def choose(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """x [n, hidden] -> the chosen experts, int64 [n, num_per_token], and their weights, float32 of that shape."""
        scaled = self.norm.normalize(x) * self.scale.data * x.shape[1] ** -0.5
        experts, weights = SoftmaxRouter(self.weight, self.num_per_token, self.renormalizes).choose(scaled)
        return experts, weights * self.expert_scale.data[experts]


@dataclass(frozen=True, slots=True)
class GroupedRouter:
    """Chooses experts in groups, by the sigmoid or softmax of their logits: see `GroupedRouting`. All in float32."""

    weight: Parameter  # [num_experts, hidden], in the model's dtype in every checkpoint
    bias: Parameter | None  # float32 [num_experts], for the choice alone
    num_per_token: int
    renormalizes: bool
    routing: GroupedRouting

    def choose(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """x [n, hidden] -> the chosen experts, int64 [n, num_per_token], and their weights, float32 of that shape."""
        routing, logits = self.routing, F.linear(x.float(), self.weight.data.float())
        scores = logits.sigmoid() if routing.is_sigmoid else logits.softmax(dim=-1)
        keys = scores if self.bias is None else scores + self.bias.data
        groups, num_best = keys.unflatten(1, (routing.num_groups, -1)), 2 if routing.is_sigmoid else 1
        best = groups.topk(num_best, dim=-1).values.sum(dim=-1).topk(routing.num_groups_per_token, dim=-1).indices
        is_left_out = torch.ones(groups.shape[:2], dtype=torch.bool, device=x.device).scatter_(1, best, False)
        experts = groups.masked_fill(is_left_out[:, :, None], -math.inf).flatten(1).topk(self.num_per_token).indices
        weights = scores.gather(1, experts)
        if self.renormalizes:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
        return experts, weights * routing.multiplier
