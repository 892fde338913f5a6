"""The first and last parts of a model: token ids become the residual, and the residual becomes logits."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from services.dense_worker.model.linear import Linear
from services.dense_worker.model.norm import RmsNorm
from services.dense_worker.model.operations import Operations, Residual
from services.dense_worker.model.parameters import Parameter


@dataclass(frozen=True, slots=True)
class Embedding:
    """Looks up a row of the table for each token."""

    table: Parameter  # [vocab, hidden]

    def forward(self, operations: Operations, token_ids: torch.Tensor) -> Residual:
        """token_ids int64 [n] -> residual [n, hidden]."""
        return operations.embed(self.table, token_ids)


@dataclass(frozen=True, slots=True)
class Head:
    """The final norm and the projection to the vocabulary."""

    norm: RmsNorm
    lm_head: Linear

    def forward(self, operations: Operations, residual: Residual) -> torch.Tensor:
        """residual [n, hidden] -> logits float32 [n, vocab]."""
        return operations.logits(residual, self.norm, self.lm_head)
