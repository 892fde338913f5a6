"""`PoolingFeature`: sequences whose prompt becomes one vector. Their prompts are part of steps like any others.

The vector is reported in the step that computes the last hidden state it depends on, with the sequence's end: a pooled
sequence has no output.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from services.common.errors import InvalidRequest
from services.common.pooling.pooling_config import PoolingConfig, PoolingMethod
from services.dense_worker.features.feature import Feature
from services.dense_worker.features.pooling.pooling_head import PoolingHead
from services.dense_worker.features.report import TokenReport
from services.dense_worker.features.sequence_feature import SequenceFeature
from services.dense_worker.features.step_part import FeatureRows, FurtherRows, StepPart, StepView
from services.dense_worker.features.token_rows import MAX_ROWS_AT_A_TIME, TokenRows
from services.dense_worker.sampling.upload import upload

if TYPE_CHECKING:
    from services.pb import dense_pb2
    from services.step import SequenceSpec, StepResult

NAME = "pooling"


class PooledSequence(SequenceFeature):
    """A sequence of which a vector is made."""

    reports = True
    reports_prompt = True

    def __init__(self, num_prompt_tokens: int, method: PoolingMethod) -> None:
        self.num_prompt_tokens = num_prompt_tokens
        self.ignores_prefix_cache = method is not PoolingMethod.LAST
        self.sum: torch.Tensor | None = None  # float32 [hidden], of its tokens in earlier steps


@dataclass(frozen=True, slots=True)
class PooledSpan:
    """The rows of a step that the vector of one sequence depends on."""

    sequence: PooledSequence
    tokens: TokenRows
    num_pooled: int  # tokens whose mean the vector is, in all steps
    is_last: bool  # no further row belongs to it


class PooledRows(StepPart):
    """The hidden states of a step that vectors depend on."""

    needs_further_rows = True

    def __init__(self, head: PoolingHead, spans: list[PooledSpan]) -> None:
        self._head, self._spans = head, spans
        self._ended = [index for index, span in enumerate(spans) if span.is_last]
        self._values: torch.Tensor | None = None  # float32 [num_ended, size], on the host

    def compute_rows(self, further: FurtherRows) -> None:
        sums = list(self._sums(further))
        for index, span in enumerate(self._spans):
            if span.tokens.start and span.sequence.sum is not None:
                sums[index] = sums[index] + span.sequence.sum
            span.sequence.sum = None if span.is_last else sums[index]
        if not self._ended:
            return
        means = torch.stack([sums[index] / self._spans[index].num_pooled for index in self._ended])
        values = self._head.forward(means)
        self._values = torch.empty(values.shape, dtype=torch.float32, pin_memory=values.device.type == "cuda")
        self._values.copy_(values, non_blocking=True)

    def read(self, result: StepResult) -> None:
        for place, index in enumerate(self._ended):
            assert self._values is not None, "the rows have been computed"
            row = self._values[place : place + 1].numpy()
            result.reports.append(TokenReport(self._spans[index].tokens.seq_id, NAME, 0, row))

    def _sums(self, further: FurtherRows) -> Iterator[torch.Tensor]:
        """The sum of the hidden states of each span: float32 [hidden]."""
        attn_out, residual = further.attn_out, further.residual
        tokens = [span.tokens for span in self._spans]
        rows = np.concatenate([np.arange(each.first_row, each.first_row + each.num_rows) for each in tokens])
        hidden = torch.empty(len(rows), residual.shape[1], dtype=attn_out.dtype, device=attn_out.device)
        size = min(MAX_ROWS_AT_A_TIME, further.max_num_rows)
        for some_rows, some_hidden in zip(upload(rows, attn_out.device).split(size), hidden.split(size), strict=True):
            further.backend.last(attn_out, residual, some_rows, some_hidden)
        for of_span in hidden.split([each.num_rows for each in tokens]):
            yield of_span.float().sum(0)  # by itself: it does not depend on what else is in the step


class PoolingFeature(Feature):
    """Has the layers after pooling."""

    name = NAME
    sequence_type = PooledSequence

    def __init__(self, pooling: PoolingConfig | None, head: PoolingHead) -> None:
        """pooling: None if the model makes no vectors"""
        self._pooling, self._head = pooling, head

    def admit(self, spec: SequenceSpec, submit: dense_pb2.Submit, stream: int) -> PooledSequence | None:
        if NAME not in spec.features:
            return None
        if self._pooling is None:
            raise InvalidRequest("this model makes no vectors: model.runner is not pooling")
        return PooledSequence(spec.num_prompt_tokens, self._pooling.method)

    def prepare_step(self, step: StepView, rows: FeatureRows) -> PooledRows | None:
        assert self._pooling is not None, "sequences have been admitted"
        spans = [
            span
            for index, each in zip(rows.indexes.tolist(), rows.features, strict=True)
            if (span := _span_of(step, index, each, self._pooling.method)) is not None
        ]
        return PooledRows(self._head, spans) if spans else None


def _span_of(step: StepView, index: int, sequence: SequenceFeature, method: PoolingMethod) -> PooledSpan | None:
    """The rows of an entry that its vector depends on; None: none."""
    assert isinstance(sequence, PooledSequence), "rows of other features are not here"
    entry, num_tokens = step.entries[index], sequence.num_prompt_tokens
    start, end = entry.position, min(entry.position + entry.num_tokens, num_tokens)
    if method is PoolingMethod.LAST:
        start = max(start, num_tokens - 1)
    elif method is PoolingMethod.CLS:
        end = min(end, 1)
    if start >= end:
        return None
    tokens = TokenRows(entry.seq_id, start, step.row_starts.item(index) + start - entry.position, end - start)
    is_mean = method is PoolingMethod.MEAN
    is_last = method is PoolingMethod.CLS or end == num_tokens
    return PooledSpan(sequence, tokens, num_tokens if is_mean else 1, is_last)
