"""`DeviceEagle`: runs an EAGLE-3 head after steps. Part of the model runner, on the engine thread.

The head has one layer, so a token's keys and values depend on its residuals and on the token after it alone: `keep`
computes them after each step, also if nobody asks for drafts after it. Attention, MLP and logits run for drafts only.
What follows a wrong draft is overwritten by the next step of its sequence, which begins at its position.

Tokens that no step of this worker has computed have no residuals, such as those of a cached prefix. Then the head
knows the sequence from the first token on that a step computes.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import numpy as np
import torch

from services.dense_worker.features.drafting.device_drafter import DeviceDrafter, DraftedRows, last_rows, may_be_drafted
from services.dense_worker.features.drafting.eagle.eagle_model import EagleGraphs, EagleModel
from services.dense_worker.features.drafting.kv_cache.draft_attention import padded_tables
from services.dense_worker.features.drafting.kv_cache.draft_blocks import (
    BLOCK_SIZE,
    PADDED_TOKENS,
    SPARE_BLOCK,
    CachedTokens,
    DraftBlocks,
    padded_groups,
)
from services.dense_worker.runner.batch_rows import RequestState
from services.dense_worker.runner.step_hook import KeptResiduals
from services.dense_worker.sampling.logprobs import to_host
from services.dense_worker.sampling.sampler import Sampler
from services.dense_worker.sampling.upload import upload
from services.step import PlanEntry

_KNOWN = -1  # instead of a sampled row: the host knows the token


@dataclass(slots=True, eq=False)
class _Kept:
    """A sequence of the newest step whose tokens the head has."""

    sequence: RequestState
    entry: PlanEntry
    cached: CachedTokens
    index: int  # of the entry, among those that need logits
    num_sampled_before: int  # sampled rows of entries before it
    first_row: int  # its first row, among those that were kept

    @property
    def end(self) -> int:
        """The position after its last row."""
        return self.entry.position + self.entry.num_tokens


class DeviceEagle(DeviceDrafter):
    """Its tokens are drawn with the noise of the served model's, as those of a draft model."""

    def __init__(self, model: EagleModel, sampler: Sampler, max_num_seqs: int, max_num_tokens: int) -> None:
        """max_num_tokens: of a step"""
        self._model = model
        self._forward = model.forward
        self._sampler = sampler
        self._max_num_seqs = max_num_seqs
        self._blocks = DraftBlocks[RequestState](model.num_blocks)
        shape = (max_num_tokens, len(model.residual_layers), model.hidden_size)
        memory = torch.zeros(shape, dtype=model.dtype, device=model.device)
        self._residuals = KeptResiduals(model.residual_layers, memory)
        self._kept: list[_Kept] = []  # of the newest step
        # Of the newest step's kept rows: the token after each, int64 [n], and its hidden state, [n, hidden].
        self._token_ids = self._hidden = memory[:0, 0]

    def residuals_out(self) -> KeptResiduals | None:
        """Memory for all tokens of a step."""
        return self._residuals

    def warm_up(self) -> None:
        """Runs the head at its largest, so that this memory is there, and captures its graphs."""
        model, device = self._model, self._model.device
        memory = self._residuals.memory
        zeros = torch.zeros(len(memory), dtype=torch.int64, device=device)
        model.keep(memory, zeros, zeros + SPARE_BLOCK * BLOCK_SIZE, zeros)
        most_blocks = -(-model.max_len // BLOCK_SIZE)
        widths = {self._max_num_seqs: max(1, PADDED_TOKENS // BLOCK_SIZE // self._max_num_seqs), 1: most_blocks}
        for num_seqs, width in widths.items():
            rows = torch.zeros(num_seqs, dtype=torch.int64, device=device)
            tables = torch.full((num_seqs, width), SPARE_BLOCK, dtype=torch.int64, device=device)
            hidden = memory.new_zeros(num_seqs, model.hidden_size)
            self._forward(rows, hidden, rows - 1, tables, rows)
        if device.type == "cuda":
            self._forward = EagleGraphs(model).forward

    def forget(self, sequences: Iterable[RequestState]) -> None:
        """These sequences have been closed."""
        for sequence in sequences:
            self._blocks.forget(sequence)

    def forget_all(self) -> None:
        """All sequences have been closed."""
        self._blocks.forget_all()
        self._kept = []

    def keep(
        self, entries: Iterable[PlanEntry], sequences: SequenceOf[RequestState], sampled: torch.Tensor | None
    ) -> None:
        """Enqueues the keys and values of the step's tokens, see `StepHook.keep`."""
        present = {each for each in sequences if may_be_drafted(each)}
        self._kept = []
        rows: list[int] = []  # of the step
        known: list[int] = []  # token ids, where the host knows the token after a row
        sources: list[int] = []  # otherwise the sampled row with this token
        slots: list[int] = []
        positions: list[int] = []
        first_row = num_sampled = index = 0
        for entry, sequence in zip(entries, sequences, strict=True):
            cached = self._reserve(entry, sequence, present) if sequence in present else None
            if cached is not None:
                self._kept.append(_Kept(sequence, entry, cached, index, num_sampled, len(rows)))
                first, num_tokens, num_logits = entry.position, entry.num_tokens, entry.num_logits
                num_known = num_tokens - num_logits
                rows += range(first_row, first_row + num_tokens)
                known += sequence.token_ids[first + 1 : first + 1 + num_known] + [0] * num_logits
                sources += [_KNOWN] * num_known + [*range(num_sampled, num_sampled + num_logits)]
                places = range(first - cached.start, first - cached.start + num_tokens)
                slots += [cached.blocks[place // BLOCK_SIZE] * BLOCK_SIZE + place % BLOCK_SIZE for place in places]
                positions += range(first, first + num_tokens)
            first_row += entry.num_tokens
            num_sampled += entry.num_logits
            index += entry.num_logits > 0
        if not rows:
            return
        columns = np.array((rows, known, sources, slots, positions), dtype=np.int64)
        row_ids, token_ids, source_rows, slot_ids, places_of_rows = upload(columns, self._model.device)
        if sampled is not None:
            token_ids = torch.where(source_rows < 0, token_ids, sampled[source_rows.clamp(min=0)])
        residuals = self._residuals.memory[:first_row]
        if len(rows) < first_row:
            residuals = residuals.index_select(0, row_ids)
        self._token_ids = token_ids
        self._hidden = self._model.keep(residuals, token_ids, slot_ids, places_of_rows)

    def draft(
        self,
        entries: Iterable[PlanEntry],
        sequences: SequenceOf[RequestState],
        sampled: torch.Tensor,
        num_tokens: int,
    ) -> DraftedRows:
        """Enqueues the head, which drafts `num_tokens` tokens of each sequence whose tokens it has."""
        present, ready = {each.sequence for each in self._kept}, []
        for each in self._kept:
            if not each.entry.num_logits or each.end + num_tokens > self._model.max_len:
                continue
            if self._blocks.reserve(each.sequence, each.end + num_tokens - each.cached.start, present) is not None:
                ready.append(each)
        if not ready:
            return DraftedRows((), torch.empty(0, num_tokens, dtype=torch.int64))
        last = last_rows([entry for entry in entries if entry.num_logits], sampled)
        ready.sort(key=lambda each: len(each.cached.blocks))
        drafts = [self._draft_group(group, last, num_tokens) for group in padded_groups(ready)]
        return DraftedRows([each.entry.seq_id for each in ready], to_host(torch.cat(drafts)))

    def _reserve(self, entry: PlanEntry, sequence: RequestState, present: set[RequestState]) -> CachedTokens | None:
        """Room for the rows of an entry, where the sequence's rows before it are, if the head has these."""
        first, end = entry.position, entry.position + entry.num_tokens
        num_known = entry.num_tokens - entry.num_logits
        if num_known and len(sequence.token_ids) <= first + num_known:
            self._blocks.forget(sequence)  # the token after a row is neither sampled nor known to the host
            return None
        cached = self._blocks.find(sequence)
        if cached is not None and not cached.start <= first <= cached.start + cached.num_tokens:
            self._blocks.forget(sequence)
            cached = None
        start = first if cached is None else cached.start
        cached = self._blocks.reserve(sequence, end - start, present)
        if cached is not None:
            cached.start, cached.num_tokens = start, end - start
        return cached

    def _draft_group(self, group: SequenceOf[_Kept], last: torch.Tensor, num_tokens: int) -> torch.Tensor:
        """int64 [len(group), num_tokens]. last: int64, the sampled row after the last right draft, of each entry with
        logits
        """
        device = self._model.device
        columns = [
            (
                each.index,
                each.first_row + each.entry.num_tokens - each.entry.num_logits - each.num_sampled_before,
                each.end - each.entry.num_logits - each.num_sampled_before,
                each.cached.start,
            )
            for each in group
        ]
        indexes, to_row, to_position, starts = upload(np.array(columns, dtype=np.int64).T.copy(), device)
        tables = upload(np.array(padded_tables([each.cached.blocks for each in group]), dtype=np.int64), device)
        slots = np.array([each.sequence.slot for each in group])
        of_group = last[indexes]
        rows, positions = of_group + to_row, of_group + to_position
        token_ids, hidden = self._token_ids[rows], self._hidden[rows]
        found: list[torch.Tensor] = []
        while True:
            logits, hidden = self._forward(token_ids, hidden, positions, tables, starts)
            positions = positions + 1
            token_ids = self._sampler.draw(logits, slots, positions + 1)
            found.append(token_ids)
            if len(found) == num_tokens:
                return torch.stack(found, dim=1)
