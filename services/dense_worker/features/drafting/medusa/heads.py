"""`MedusaHeads`: several small networks that draft, from one hidden state, a token of a text each.

The model samples the next token from a hidden state; head i drafts the token i + 1 places after that one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional as F


@dataclass(frozen=True, slots=True)
class ResidualBlocks:
    """One residual block of each head: x + SiLU(W x + b)."""

    weight: torch.Tensor  # [num_heads, hidden, hidden]
    bias: torch.Tensor  # [num_heads, 1, hidden]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [num_heads, n, hidden] -> the same shape."""
        return x + F.silu(torch.baddbmm(self.bias, x, self.weight.transpose(1, 2)))


@dataclass(frozen=True, slots=True)
class MedusaHeads:
    """All heads, on the device and in the dtype of the model. Each product is that of all heads and rows at once."""

    blocks: Sequence[ResidualBlocks]  # in the order in which they run
    lm_head: torch.Tensor  # [num_heads, vocab, hidden]

    @property
    def num_heads(self) -> int:
        return self.lm_head.shape[0]

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """All tensors, or views of them."""
        for index, block in enumerate(self.blocks):
            yield f"blocks.{index}.weight", block.weight
            yield f"blocks.{index}.bias", block.bias
        yield "lm_head", self.lm_head

    def draft(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [n, hidden] after the model's last norm -> the most likely token of each head, int64 [n, num_heads].

        It takes memory for num_heads · n · vocab logits, and does not wait for the device.
        """
        x = hidden.expand(self.num_heads, *hidden.shape)
        for block in self.blocks:
            x = block.forward(x)
        return torch.bmm(x, self.lm_head.transpose(1, 2)).argmax(-1).T
