"""How some checkpoints store a tensor: transposed, or with the heads of q, k and v in another order."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Transposed:
    """A StoredLayout of weights [in_features, out_features] (the Conv1D layers of GPT-2); biases are as here."""

    def stored_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The reversed shape."""
        return shape[::-1]

    def restore(self, stored: torch.Tensor) -> torch.Tensor:
        """A view of the tensor with its dimensions swapped."""
        return stored.t() if stored.dim() == 2 else stored


@dataclass(frozen=True, slots=True)
class GroupedHeads:
    """A StoredLayout of a fused projection: for each kv head its q heads, then its k head, then its v head.

    Here all q heads come first, then all k heads, then all v heads.
    """

    num_kv_heads: int
    head_dim: int

    def stored_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The same shape."""
        return shape

    def restore(self, stored: torch.Tensor) -> torch.Tensor:
        """A copy with reordered rows."""
        groups = stored.view(self.num_kv_heads, -1, self.head_dim, *stored.shape[1:])
        q, k, v = groups.split([groups.shape[1] - 2, 1, 1], dim=1)
        return torch.cat([part.reshape(-1, *stored.shape[1:]) for part in (q, k, v)])
