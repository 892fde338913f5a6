"""`Router`: chooses the experts of each token."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional as F

from services.dense_worker.model.parameters import Parameter


@dataclass(frozen=True, slots=True)
class Router:
    """Chooses experts by the softmax of its logits."""

    weight: Parameter  # [num_experts, hidden], in the model's dtype in every checkpoint
    num_per_token: int
    renormalizes: bool

    def choose(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """x [n, hidden] -> the chosen experts, int64 [n, num_per_token], and their weights, float32 of that shape."""
        scores = F.linear(x, self.weight.data).softmax(dim=-1, dtype=torch.float32)
        weights, experts = scores.topk(self.num_per_token, dim=-1)
        return experts, weights / weights.sum(dim=-1, keepdim=True) if self.renormalizes else weights
