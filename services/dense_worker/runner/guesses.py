"""Guesses of the tokens after those of a step, by Medusa heads. Part of the model runner.

The heads run only after steps for which the scheduler asks for guesses. They guess for all sequences of the step: one
product reads the heads' weights once, however many rows there are.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import numpy as np
import torch

from services.dense_worker.medusa.heads import MedusaHeads
from services.dense_worker.sampling.logprobs import to_host
from services.dense_worker.sampling.upload import upload
from services.step import PlanEntry

_NO_DRAFT = -1  # no token id


@dataclass(frozen=True, slots=True)
class PendingGuesses:
    """A tensor on the host that the device fills when it has run the heads."""

    seq_ids: SequenceOf[int]
    token_ids: torch.Tensor  # int64 [len(seq_ids), num_heads]

    def read(self) -> dict[int, tuple[int, ...]]:
        """The guesses by seq_id. The device must have run the heads."""
        return dict(zip(self.seq_ids, map(tuple, self.token_ids.tolist()), strict=True))


class GuessingHeads:
    """Medusa heads with the hidden states from which the newest step samples."""

    def __init__(self, heads: MedusaHeads, max_num_seqs: int) -> None:
        self._heads = heads
        like = heads.lm_head
        # `DenseBackend.last` writes the rows here, those of captured graphs too. [max_num_seqs, hidden]
        self.hidden = torch.zeros(max_num_seqs, like.shape[2], dtype=like.dtype, device=like.device)

    def warm_up(self) -> None:
        """Runs the heads for as many rows as a step may have, so that their memory is there."""
        self._heads.guess(self.hidden)

    def guess(self, entries: SequenceOf[PlanEntry], sampled: torch.Tensor) -> PendingGuesses:
        """Enqueues the heads on the rows from which the last tokens of the entries were sampled.

        Called before another step is enqueued. sampled: int64 [num_sampled], the step's tokens, on the device
        """
        entries = [entry for entry in entries if entry.num_logits]
        rows = last_rows(entries, sampled)
        return PendingGuesses([entry.seq_id for entry in entries], to_host(self._heads.guess(self.hidden[rows])))


def last_rows(entries: SequenceOf[PlanEntry], sampled: torch.Tensor) -> torch.Tensor:
    """For each entry, int64 [num_entries] on the device: the sampled row after its last right draft.

    Every entry needs logits of its own; sampled: int64 [num_sampled], the tokens of all these rows
    """
    first = np.cumsum([0, *(entry.num_logits for entry in entries)])[:-1]
    width = max(entry.num_logits for entry in entries)
    if width == 1:
        return upload(first, sampled.device)
    drafts = np.full((len(entries), width), _NO_DRAFT)
    for row, entry in zip(drafts, entries, strict=True):
        row[: len(entry.draft_token_ids)] = entry.draft_token_ids
    rows = np.minimum(first[:, None] + np.arange(width), len(sampled) - 1)
    rows_on_device, drafts_on_device = upload(np.stack([rows, drafts]), sampled.device)
    is_right = sampled[rows_on_device] == drafts_on_device
    return rows_on_device[:, 0] + is_right.cumprod(1).sum(1)
