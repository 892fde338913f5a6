"""`MedusaHeads`: several small networks that draft, from one hidden state, a token of a text each.

The model samples the next token from a hidden state; head i drafts the token i + 1 places after that one. `DeviceHeads`
runs them after a step: a part of the model runner, on the engine thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from services.dense_worker.features.drafting.device_drafter import DeviceDrafter, DraftedRows, last_rows
from services.dense_worker.runner.batch_rows import RequestState
from services.dense_worker.sampling.logprobs import to_host
from services.step import PlanEntry


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


class DeviceHeads(DeviceDrafter):
    """The heads with the hidden states from which the newest step samples.

    They draft for all sequences of the step: one product reads their weights once, however many rows there are.
    """

    def __init__(self, heads: MedusaHeads, max_num_seqs: int) -> None:
        self._heads = heads
        like = heads.lm_head
        # `DenseBackend.last` writes the rows here, those of captured graphs too. [max_num_seqs, hidden]
        self.hidden = torch.zeros(max_num_seqs, like.shape[2], dtype=like.dtype, device=like.device)

    def hidden_out(self, num_sampled: int) -> torch.Tensor | None:
        """The first rows of `hidden`."""
        return self.hidden[:num_sampled]

    def warm_up(self) -> None:
        """Runs the heads for as many rows as a step may have."""
        self._heads.draft(self.hidden)

    def draft(
        self,
        entries: Iterable[PlanEntry],
        sequences: SequenceOf[RequestState],
        sampled: torch.Tensor,
        num_tokens: int,
    ) -> DraftedRows:
        """Enqueues the heads on the rows from which the last tokens of the entries were sampled: all heads draft."""
        entries = [entry for entry in entries if entry.num_logits]
        rows = last_rows(entries, sampled)
        return DraftedRows([entry.seq_id for entry in entries], to_host(self._heads.draft(self.hidden[rows])))
