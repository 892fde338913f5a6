"""`LeadingStage`: the backend of a pipeline's first stage, at whose calls the other stages run their layers."""

from __future__ import annotations

import torch

from services.dense_worker.backends import DenseBackend
from services.dense_worker.kernels.lora.tensors import LoraStore
from services.dense_worker.ranks.leading_backend import LeadingBackend
from services.dense_worker.ranks.stage_links import StageLinks
from services.pb import shard_pb2


class LeadingStage(LeadingBackend):
    """A DenseBackend around that of the stage's own layers. Its logits are those of the last stage."""

    always_ends = True
    shares_vectors = False  # it has the first layers alone

    def __init__(
        self,
        backend: DenseBackend,
        links: StageLinks,
        vocab_size: int,
        lora: LoraStore | None = None,
    ) -> None:
        """`links` and `lora`: those of the backend."""
        super().__init__(backend, links, lora)
        self.gives_hidden_states = False  # the last stage has them
        self._links, self._vocab_size = links, vocab_size
        self._defers_logits = False

    def defer_logits(self) -> None:
        """From now on, the logits that a step's first call of `last` returns are not there before `await_logits`."""
        self._defers_logits = True

    def await_logits(self) -> None:
        """Waits for the logits of the last stage. Raises as `RankGroup.receive`."""
        self._links.await_logits()

    def last(
        self,
        attn_out: torch.Tensor,
        residual: torch.Tensor,
        rows: torch.Tensor,
        hidden_out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Passes the rows on once, and gets logits; those of further rows the last stage computes alone."""
        if not self._has_logits:
            self._has_logits = True
            logits = self._backend.last(attn_out, residual, rows, hidden_out)
            if not self._defers_logits:
                self.await_logits()
            return logits
        further = shard_pb2.FurtherRows(rows=rows.tolist(), lane=self.ranks.lane)
        self.ranks.send(shard_pb2.ShardCommand(further_rows=further))
        self._links.num_sampled = len(rows)
        is_float32 = self.logits_dtype == torch.float32
        logits = self._links.receive_logits(residual, self._vocab_size, in_float32=is_float32)
        self.await_logits()
        return logits
