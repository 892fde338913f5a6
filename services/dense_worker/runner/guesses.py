"""Guesses of the tokens after those of a step, by Medusa heads, an EAGLE-3 head or a draft model.

Part of the model runner. They run only after steps for which the scheduler asks for guesses. Medusa heads guess for all
sequences of the step: one product reads their weights once, however many rows there are.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from services.dense_worker.medusa.heads import MedusaHeads
from services.dense_worker.runner.known_sequence import KnownSequence
from services.dense_worker.sampling.logprobs import to_host
from services.dense_worker.sampling.upload import upload
from services.step import PlanEntry

_NO_DRAFT = -1  # no token id


@dataclass(frozen=True, slots=True)
class KeptResiduals:
    """Where each step copies its residuals before some layers: the same memory for all steps and graphs."""

    layers: SequenceOf[int]  # may have a layer several times
    memory: torch.Tensor  # [max_num_tokens, len(layers), hidden]

    def put(self, layer: int, residual: torch.Tensor) -> None:
        """Copies the residual [n, hidden] before this layer, if it is one of the layers."""
        for place, each in enumerate(self.layers):
            if each == layer:
                self.memory[: len(residual), place] = residual


class PendingGuesses(Protocol):
    """Guesses that the device is computing."""

    def read(self) -> dict[int, tuple[int, ...]]:
        """The guesses by seq_id, see `StepResult.guesses`. The device must have computed them."""


class Guessing(Protocol):
    """Guesses the tokens after those of a step, on the stream of the steps. No method waits for the device."""

    def hidden_out(self, num_sampled: int) -> torch.Tensor | None:
        """Where a step writes its hidden states, [num_sampled, hidden]; None: they are not needed."""

    def residuals_out(self) -> KeptResiduals | None:
        """Where every step copies residuals; None: they are not needed."""

    def warm_up(self) -> None:
        """Runs it at its largest, so that this memory is there."""

    def forget(self, sequences: Iterable[KnownSequence]) -> None:
        """These sequences have been closed."""

    def forget_all(self) -> None:
        """All sequences have been closed."""

    def keep(
        self, entries: Iterable[PlanEntry], sequences: SequenceOf[KnownSequence], sampled: torch.Tensor | None
    ) -> None:
        """Enqueues what has to be kept of a step for later guesses.

        Called when a step has been sampled, before the next one overwrites its residuals. sequences: aligned with the
        entries; sampled: int64 [num_sampled], on the device, or None: the step samples no token
        """

    def guess(
        self,
        entries: Iterable[PlanEntry],
        sequences: SequenceOf[KnownSequence],
        sampled: torch.Tensor,
        num_tokens: int,
    ) -> PendingGuesses:
        """Enqueues what guesses at most `num_tokens` tokens of each sequence of the newest step.

        Called before another step is enqueued. sequences: aligned with the entries; sampled: int64 [num_sampled], the
        step's tokens, on the device
        """


@dataclass(frozen=True, slots=True)
class PendingHeads:
    """A tensor on the host that the device fills when it has run the heads."""

    seq_ids: SequenceOf[int]
    token_ids: torch.Tensor  # int64 [len(seq_ids), num_guesses]

    def read(self) -> dict[int, tuple[int, ...]]:
        """The guesses by seq_id. The device must have run the heads."""
        return dict(zip(self.seq_ids, map(tuple, self.token_ids.tolist()), strict=True))


class GuessingHeads:
    """A `Guessing`: Medusa heads with the hidden states from which the newest step samples."""

    def __init__(self, heads: MedusaHeads, max_num_seqs: int) -> None:
        self._heads = heads
        like = heads.lm_head
        # `DenseBackend.last` writes the rows here, those of captured graphs too. [max_num_seqs, hidden]
        self.hidden = torch.zeros(max_num_seqs, like.shape[2], dtype=like.dtype, device=like.device)

    def hidden_out(self, num_sampled: int) -> torch.Tensor | None:
        """The first rows of `hidden`."""
        return self.hidden[:num_sampled]

    def residuals_out(self) -> KeptResiduals | None:
        """It reads none."""
        return None

    def keep(
        self, entries: Iterable[PlanEntry], sequences: SequenceOf[KnownSequence], sampled: torch.Tensor | None
    ) -> None:
        """It keeps nothing."""

    def warm_up(self) -> None:
        """Runs the heads for as many rows as a step may have."""
        self._heads.guess(self.hidden)

    def forget(self, sequences: Iterable[KnownSequence]) -> None:
        """It keeps nothing of them."""

    def forget_all(self) -> None:
        """It keeps nothing of them."""

    def guess(
        self,
        entries: Iterable[PlanEntry],
        sequences: SequenceOf[KnownSequence],
        sampled: torch.Tensor,
        num_tokens: int,
    ) -> PendingHeads:
        """Enqueues the heads on the rows from which the last tokens of the entries were sampled: all heads guess."""
        entries = [entry for entry in entries if entry.num_logits]
        rows = last_rows(entries, sampled)
        return PendingHeads([entry.seq_id for entry in entries], to_host(self._heads.guess(self.hidden[rows])))


def may_have_guesses(sequence: KnownSequence) -> bool:
    """Whether drafts of it could be used, see `may_have_drafts`; those that a form forces need no model."""
    is_plain = sequence.grammar is None and sequence.table is None and not sequence.has_forced_tokens
    return is_plain and not sequence.spec.sampling.depends_on_output


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
