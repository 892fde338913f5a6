"""`DeviceDrafter`: what drafts on the device after a step: Medusa heads, an EAGLE-3 head or a draft model.

Part of the model runner, on the engine thread. It drafts only after steps for which a `DraftRequest` asks, for all
sequences of the step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from services.dense_worker.runner.batch_rows import RequestState
from services.dense_worker.runner.step_hook import StepHook
from services.dense_worker.sampling.upload import upload
from services.step import PlanEntry

_NO_DRAFT = -1  # no token id


class PendingDrafts(Protocol):
    """Draft tokens that the device is computing."""

    def read(self) -> dict[int, tuple[int, ...]]:
        """They by seq_id, see `DraftRequest.token_ids`. The device must have computed them."""


class DeviceDrafter(StepHook):
    """Drafts the tokens after those of a step, on the stream of the steps."""

    needs_logits = True

    def draft(
        self,
        entries: Iterable[PlanEntry],
        sequences: SequenceOf[RequestState],
        sampled: torch.Tensor,
        num_tokens: int,
    ) -> PendingDrafts:
        """Enqueues what drafts at most `num_tokens` tokens of each sequence of the newest step.

        Does not wait for the device. The rest is as in `FollowUp.enqueue`.
        """
        raise NotImplementedError


class DraftRequest:
    """A `FollowUp`: asks for drafts of the tokens after those of one step."""

    def __init__(self, drafter: DeviceDrafter, num_tokens: int) -> None:
        """num_tokens: most of each sequence"""
        self.num_tokens = num_tokens
        # By seq_id, when the step has been collected. No tokens: the drafter has not computed the sequence's own yet.
        self.token_ids: Mapping[int, SequenceOf[int]] = {}
        self._drafter = drafter
        self._pending: PendingDrafts | None = None

    def enqueue(
        self, entries: Iterable[PlanEntry], sequences: SequenceOf[RequestState], sampled: torch.Tensor
    ) -> None:
        """Enqueues the drafter."""
        self._pending = self._drafter.draft(entries, sequences, sampled, self.num_tokens)

    def read(self) -> None:
        """Fills `token_ids`."""
        if self._pending is not None:
            self.token_ids, self._pending = self._pending.read(), None


@dataclass(frozen=True, slots=True)
class DraftedRows:
    """`PendingDrafts` of as many tokens for each sequence: a tensor on the host that the device fills."""

    seq_ids: SequenceOf[int]
    token_ids: torch.Tensor  # int64 [len(seq_ids), num_tokens]

    def read(self) -> dict[int, tuple[int, ...]]:
        """The rows by seq_id."""
        return dict(zip(self.seq_ids, map(tuple, self.token_ids.tolist()), strict=True))


def may_be_drafted(sequence: RequestState) -> bool:
    """Whether drafts of it could be used, see `may_have_drafts`; those that a grammar forces need no model."""
    is_free = all([each.allows_drafts and not each.forces_tokens for each in sequence.features])
    is_plain = is_free and not sequence.has_forced_tokens
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
