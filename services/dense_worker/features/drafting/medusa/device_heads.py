"""`DeviceHeads`: runs Medusa heads after a step. Part of the model runner, on the engine thread.

They draft for all sequences of the step: one product reads their weights once, however many rows there are.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf

import torch

from services.dense_worker.features.drafting.device_drafter import DeviceDrafter, DraftedRows, last_rows
from services.dense_worker.features.drafting.medusa.heads import MedusaHeads
from services.dense_worker.runner.batch_rows import RequestState
from services.dense_worker.sampling.logprobs import to_host
from services.step import PlanEntry


class DeviceHeads(DeviceDrafter):
    """The heads with the hidden states from which the newest step samples."""

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
