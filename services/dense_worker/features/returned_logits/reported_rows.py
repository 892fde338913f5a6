"""`ReportedRows`: the logits, hidden states and log-probabilities that a step reports. Engine thread.

They are copied to the host in the order of the step's work: logits from which tokens are sampled before the sampler
changes them, all others after it.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import numpy as np
import torch

from services.dense_worker.features.returned_logits.prompt_logprobs import (
    MAX_ROWS_AT_A_TIME,
    PromptSpan,
    RankedSpans,
    find_span,
    rank_prompt_tokens,
)
from services.dense_worker.features.returned_logits.reports import Logits
from services.dense_worker.features.returned_logits.sequence_reports import SequenceReports
from services.dense_worker.features.step_part import FeatureRows, FurtherRows, StepPart, StepView
from services.dense_worker.sampling.logprobs import to_host
from services.dense_worker.sampling.upload import upload
from services.step import PlanEntry, StepResult, TokenReport


@dataclass(frozen=True, slots=True)
class TokenRows:
    """Consecutive tokens of a sequence of which a step reports something."""

    seq_id: int
    start: int  # index of the first one in the sequence
    first_row: int
    num_rows: int


@dataclass(frozen=True, slots=True)
class SampledLogits:
    """Rows of an entry that are sampled, and whose logits are reported."""

    index: int  # of the entry
    seq_id: int
    start: int  # index of the first row's token, among the output tokens
    first_row: int  # among all sampled rows of the step
    num_rows: int


class ReportedRows(StepPart):
    """Which rows a step reports, and tensors on the host that the device fills when it runs the step."""

    def __init__(self) -> None:
        self._sampled: list[SampledLogits] = []
        self._prompts: list[TokenRows] = []  # of prompts, whose logits are reported
        self._hidden: list[TokenRows] = []  # whose hidden states are reported
        self._progress: list[TokenRows] = []  # of prompts, of which only the number is reported
        self._spans: list[PromptSpan] = []  # of prompts, whose log-probabilities are reported
        self._sampled_values: torch.Tensor | None = None  # float32 [rows of all `_sampled`, vocab_size]
        self._prompt_values: torch.Tensor | None = None  # float32 [rows of all `_prompts`, vocab_size]
        self._hidden_values: torch.Tensor | None = None  # float32 [rows of all `_hidden`, hidden]
        self._ranked: RankedSpans | None = None

    @classmethod
    def of(cls, step: StepView, rows: FeatureRows) -> ReportedRows | None:
        """What the sequences of a step report; None: nothing."""
        part = cls()
        for index, feature in zip(rows.indexes.tolist(), rows.features, strict=True):
            part._add(feature, step, index)
        has_any = part._sampled or part._progress or part.needs_further_rows
        return part if has_any else None

    @property
    def needs_further_rows(self) -> bool:
        """Whether rows beyond the sampled ones are reported."""
        return bool(self._prompts or self._hidden or self._spans)

    def copy_logits(self, logits: torch.Tensor) -> None:
        """Copies the rows of output tokens to the host."""
        if self._sampled:
            rows = [np.arange(each.first_row, each.first_row + each.num_rows) for each in self._sampled]
            self._sampled_values = to_host(logits[upload(np.concatenate(rows), logits.device)])

    def compute_rows(self, further: FurtherRows) -> None:
        """Computes the logits after prompt tokens, hidden states, and log-probabilities; copies them to the host."""
        backend, attn_out, residual = further.backend, further.attn_out, further.residual
        size = min(MAX_ROWS_AT_A_TIME, further.max_num_rows)

        def hidden_states(rows: torch.Tensor) -> torch.Tensor:
            hidden = torch.empty(len(rows), residual.shape[1], dtype=attn_out.dtype, device=attn_out.device)
            backend.last(attn_out, residual, rows, hidden)
            return hidden

        self._prompt_values = _copy(
            lambda rows: backend.last(attn_out, residual, rows), self._prompts, attn_out.device, size
        )
        self._hidden_values = _copy(hidden_states, self._hidden, attn_out.device, size)
        if self._spans:
            self._ranked = rank_prompt_tokens(backend, attn_out, residual, self._spans, size).to_host()

    def read(self, result: StepResult) -> None:
        """Reports logits of accepted tokens, and everything of prompts."""
        end = 0
        for sampled in self._sampled:
            begin, end = end, end + sampled.num_rows
            assert self._sampled_values is not None, "the rows have been copied"
            if num_tokens := result.token_ids.counts.item(sampled.index):
                values = self._sampled_values[begin : begin + num_tokens].numpy()
                result.reports.append(Logits(sampled.seq_id, sampled.start, values, is_output=True))
        for spans, values in ((self._prompts, self._prompt_values), (self._hidden, self._hidden_values)):
            end = 0
            for rows in spans:
                begin, end = end, end + rows.num_rows
                assert values is not None, "there are rows"
                result.reports.append(Logits(rows.seq_id, rows.start, values[begin:end].numpy()))
        for rows in self._progress:
            result.reports.append(Logits(rows.seq_id, rows.start, np.empty((rows.num_rows, 0), np.float32)))
        if self._ranked is not None:
            result.reports.extend(self._ranked.read())

    def _add(self, feature: SequenceReports, step: StepView, index: int) -> None:
        entry, first_row = step.entries[index], step.row_starts.item(index)
        if feature.prompt_logprobs and (span := find_span(entry, feature.spec, first_row)):
            self._spans.append(span)
        if feature.token_report:
            self._add_tokens(entry, feature, first_row)
        if feature.spec.return_generation_logits and entry.num_logits:
            start = entry.position + entry.num_tokens - entry.num_logits + 1 - feature.spec.num_prompt_tokens
            first_sampled = step.sampled_starts.item(index)
            self._sampled.append(SampledLogits(index, entry.seq_id, start, first_sampled, entry.num_logits))

    def _add_tokens(self, entry: PlanEntry, feature: SequenceReports, first_row: int) -> None:
        """Adds what is reported of the tokens of an entry, which begin at `first_row`."""
        if feature.token_report is TokenReport.HIDDEN_STATES:
            self._hidden.append(TokenRows(entry.seq_id, entry.position, first_row, entry.num_tokens))
            return
        num_rows = min(entry.num_tokens, feature.spec.num_prompt_tokens - entry.position)
        if num_rows > 0:
            rows = self._prompts if feature.token_report is TokenReport.CONTEXT_LOGITS else self._progress
            rows.append(TokenRows(entry.seq_id, entry.position, first_row, num_rows))


def _copy(
    compute: Callable[[torch.Tensor], torch.Tensor], spans: SequenceOf[TokenRows], device: torch.device, size: int
) -> torch.Tensor | None:
    """What `compute` gives for the rows of all spans, float32 on the host; `size` rows at a time."""
    if not spans:
        return None
    rows = np.concatenate([np.arange(each.first_row, each.first_row + each.num_rows) for each in spans])
    host: torch.Tensor | None = None
    begin = 0
    for some_rows in upload(rows, device).split(size):
        values = compute(some_rows)
        if host is None:
            shape = (len(rows), values.shape[1])
            host = torch.empty(shape, dtype=torch.float32, pin_memory=values.device.type == "cuda")
        host[begin : begin + len(some_rows)].copy_(values, non_blocking=True)
        begin += len(some_rows)
    return host
