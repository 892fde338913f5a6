"""`DeviceDraftModel`: runs a draft model after a step, for drafts of the tokens after those of the step.

Part of the model runner, on the engine thread. The host knows all tokens of a sequence but those that the step has just
sampled, and these are not waited for: the draft model computes all of them, also those after a wrong draft, and goes on
behind the last right one. What it has stored behind that is overwritten before anything reads it.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import numpy as np
import torch

from services.dense_worker.features.drafting.device_drafter import DeviceDrafter, last_rows, may_be_drafted
from services.dense_worker.features.drafting.draft_model.model import DraftGraphs, DraftModel
from services.dense_worker.features.drafting.kv_cache.draft_attention import padded_tables
from services.dense_worker.features.drafting.kv_cache.draft_blocks import (
    BLOCK_SIZE,
    MAX_LATE_TOKENS,
    PADDED_TOKENS,
    CachedTokens,
    DraftBlocks,
    padded_groups,
)
from services.dense_worker.runner.batch_rows import RequestState
from services.dense_worker.sampling.logprobs import to_host
from services.dense_worker.sampling.sampler import Sampler
from services.dense_worker.sampling.upload import upload
from services.step import PlanEntry

# Tokens of all sequences that one call computes for those that are further behind. A GPU computes as many in about the
# time of one; a CPU takes time for each.
CATCH_UP_TOKENS = {"cpu": 64, "cuda": 512}
_MAX_SCORES = 2**22  # of one head, in a pass that computes known tokens: a long text is computed in shorter parts


@dataclass(slots=True, eq=False)
class _Drafted:
    """A sequence that gets drafts, or is being made ready for them."""

    sequence: RequestState
    entry: PlanEntry
    index: int  # of the entry, among those that need logits
    first: int  # its first row, among the step's sampled ones
    cached: CachedTokens

    @property
    def num_late(self) -> int:
        """Tokens that the host knows and the cache lacks."""
        return len(self.sequence.token_ids) - self.cached.num_tokens


@dataclass(frozen=True, slots=True)
class PendingModelDrafts:
    """A tensor on the host that the device fills when it has run the draft model."""

    drafted: SequenceOf[_Drafted]
    num_known: SequenceOf[int]  # tokens of each that the host knew
    found: torch.Tensor | None  # int64 [len(drafted), 1 + num_tokens]: number of right drafts, new ones; None: empty
    behind: SequenceOf[int]  # seq_ids of those that are not ready yet

    def read(self) -> dict[int, tuple[int, ...]]:
        """The new drafts by seq_id; those of a sequence that is not ready are empty, one without room is missing.

        The device must have run the draft model.
        """
        drafts: dict[int, tuple[int, ...]] = dict.fromkeys(self.behind, ())
        if self.found is None:
            return drafts
        for each, num_known, (num_right, *token_ids) in zip(
            self.drafted, self.num_known, self.found.tolist(), strict=True
        ):
            each.cached.num_tokens = num_known + num_right + 1
            drafts[each.entry.seq_id] = tuple(token_ids)
        return drafts


class DeviceDraftModel(DeviceDrafter):
    """Tokens are drawn with the noise of the served model's: so like logits give like tokens."""

    def __init__(self, model: DraftModel, sampler: Sampler, max_num_seqs: int) -> None:
        self._model = model
        self._forward = model.forward
        self._sampler = sampler
        self._max_num_seqs = max_num_seqs
        self._blocks = DraftBlocks[RequestState](model.num_blocks)

    def warm_up(self) -> None:
        """Runs the model at its largest, so that this memory is there, and captures its graphs."""
        device = self._model.device
        most_blocks = -(-self._model.max_len // BLOCK_SIZE)
        widths = {self._max_num_seqs: max(1, PADDED_TOKENS // BLOCK_SIZE // self._max_num_seqs), 1: most_blocks}
        for num_seqs, width in widths.items():
            for num_rows in {1, self._most_rows(width) if num_seqs == 1 else 2 * MAX_LATE_TOKENS}:
                zeros = torch.zeros(num_seqs, num_rows, dtype=torch.int64, device=device)
                tables = torch.zeros(num_seqs, width, dtype=torch.int64, device=device)
                self._forward(zeros, zeros - 1, tables, torch.arange(num_seqs, device=device))
        if device.type == "cuda":
            self._forward = DraftGraphs(self._model).forward

    def forget(self, sequences: Iterable[RequestState]) -> None:
        """These sequences have been closed."""
        for sequence in sequences:
            self._blocks.forget(sequence)

    def forget_all(self) -> None:
        """All sequences have been closed."""
        self._blocks.forget_all()

    def draft(
        self,
        entries: Iterable[PlanEntry],
        sequences: SequenceOf[RequestState],
        sampled: torch.Tensor,
        num_tokens: int,
    ) -> PendingModelDrafts:
        """Enqueues the draft model, which drafts `num_tokens` tokens of each sequence.

        Called before another step is enqueued. sampled: int64 [num_sampled], the step's tokens, on the device
        """
        drafted = self._reserve(entries, sequences, num_tokens)
        self._catch_up(drafted)
        ready = [each for each in drafted if each.num_late <= MAX_LATE_TOKENS]
        behind = [each.entry.seq_id for each in drafted if each.num_late > MAX_LATE_TOKENS]
        if not ready:
            return PendingModelDrafts((), (), None, behind)
        last = last_rows([entry for entry in entries if entry.num_logits], sampled)
        ready.sort(key=lambda each: len(each.cached.blocks))
        found = [self._draft_group(group, last, sampled, num_tokens) for group in padded_groups(ready)]
        num_known = [len(each.sequence.token_ids) for each in ready]
        for each, number in zip(ready, num_known, strict=True):
            each.cached.num_tokens = number
        return PendingModelDrafts(ready, num_known, to_host(torch.cat(found)), behind)

    def _reserve(
        self, entries: Iterable[PlanEntry], sequences: SequenceOf[RequestState], num_tokens: int
    ) -> list[_Drafted]:
        """The sequences that may have drafts and for which there is room."""
        places: list[tuple[PlanEntry, RequestState, int, int]] = []
        index = first = 0
        for entry, sequence in zip(entries, sequences, strict=True):
            if entry.num_logits:
                if may_be_drafted(sequence):
                    places.append((entry, sequence, index, first))
                index += 1
                first += entry.num_logits
        present = {sequence for _, sequence, _, _ in places}
        drafted = []
        for entry, sequence, index, first in places:
            most = len(sequence.token_ids) + entry.num_logits + num_tokens
            cached = self._blocks.reserve(sequence, most, present) if most <= self._model.max_len else None
            if cached is not None:
                drafted.append(_Drafted(sequence, entry, index, first, cached))
        return drafted

    def _catch_up(self, drafted: list[_Drafted]) -> None:
        """Computes known tokens of sequences that are far behind."""
        num_left = CATCH_UP_TOKENS[self._model.device.type]
        for each in drafted:
            if each.num_late <= MAX_LATE_TOKENS or not num_left:
                continue
            first = each.cached.num_tokens
            num_tokens = min(num_left, self._most_rows(len(each.cached.blocks)))
            token_ids = each.sequence.token_ids[first : first + num_tokens]
            rows = np.array([token_ids, range(first, first + len(token_ids))], dtype=np.int64)
            token_rows, positions = upload(rows, self._model.device)[:, None]
            tables = upload(np.array(padded_tables([each.cached.blocks]), dtype=np.int64), self._model.device)
            self._forward(token_rows, positions, tables, None)
            each.cached.num_tokens += len(token_ids)
            num_left -= len(token_ids)

    def _most_rows(self, num_blocks: int) -> int:
        """The most tokens that are computed at once of a sequence with so many blocks."""
        return min(CATCH_UP_TOKENS[self._model.device.type], max(1, _MAX_SCORES // (num_blocks * BLOCK_SIZE)))

    def _draft_group(
        self, group: SequenceOf[_Drafted], last: torch.Tensor, sampled: torch.Tensor, num_tokens: int
    ) -> torch.Tensor:
        """int64 [len(group), 1 + num_tokens], see `PendingModelDrafts.found`.

        last: int64, the sampled row after the last right draft, of each entry with logits
        """
        device, num_seqs = self._model.device, len(group)
        width = max(each.num_late + each.entry.num_logits for each in group)
        token_ids, sources, positions = rows = np.zeros((3, num_seqs, width), dtype=np.int64)
        sources[...] = positions[...] = -1
        for i, each in enumerate(group):
            begin, num_late, num_rows = each.cached.num_tokens, each.num_late, each.num_late + each.entry.num_logits
            token_ids[i, :num_late] = each.sequence.token_ids[begin:]
            sources[i, num_late:num_rows] = range(each.first, each.first + each.entry.num_logits)
            positions[i, :num_rows] = range(begin, begin + num_rows)
        known, source_rows, position_rows = upload(rows, device)
        indexes, firsts, offsets = upload(
            np.array(
                [(each.index, each.first, i * width + each.num_late) for i, each in enumerate(group)], dtype=np.int64
            ).T.copy(),
            device,
        )
        tables = upload(np.array(padded_tables([each.cached.blocks for each in group]), dtype=np.int64), device)
        tokens = torch.where(source_rows < 0, known, sampled[source_rows.clamp(min=0)])
        num_right = last[indexes] - firsts
        last_row = offsets + num_right
        logits = self._forward(tokens, position_rows, tables, last_row)
        places = position_rows.flatten()[last_row]
        slots = np.array([each.sequence.slot for each in group])
        every = torch.arange(num_seqs, device=device)
        found = [num_right]
        while True:
            assert logits is not None, "rows need logits"
            places = places + 1
            found.append(self._sampler.draw(logits, slots, places))
            if len(found) > num_tokens:
                return torch.stack(found, dim=1)
            logits = self._forward(found[-1][:, None], places[:, None], tables, every)
