"""`PoolingFeature`: sequences whose prompt becomes one vector, or one for each token.

Their prompts are part of steps like any others. The vector is reported in the step that computes the last hidden state
it depends on, with the sequence's end: a pooled sequence has no output. Vectors of tokens are reported in the step that
computes them.
"""

from __future__ import annotations

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
from services.dense_worker.features.step_part import FeatureRows, StepPart, StepView
from services.dense_worker.features.token_rows import TokenRows, rows_of, split_rows, to_host
from services.dense_worker.sampling.upload import upload
from services.pb import pooling_pb2

if TYPE_CHECKING:
    from services.pb import dense_pb2
    from services.step import SequenceSpec, StepResult

NAME = "pooling"


class PooledSequence(SequenceFeature):
    """A sequence of which a vector is made."""

    reports = True
    reports_prompt = True
    has_output = False

    def __init__(self, num_prompt_tokens: int, method: PoolingMethod) -> None:
        self.num_prompt_tokens, self.method = num_prompt_tokens, method
        self.ignores_prefix_cache = method is not PoolingMethod.LAST
        self.sum: torch.Tensor | None = None  # float32 [hidden], of its tokens in earlier steps


@dataclass(frozen=True, slots=True)
class PooledSpan:
    """The rows of a step that the vector of one sequence depends on, or its vectors."""

    sequence: PooledSequence
    tokens: TokenRows
    num_pooled: int  # tokens whose mean the vector is, in all steps
    is_last: bool  # no further row belongs to it


class PooledRows(StepPart):
    """The hidden states of a step that vectors depend on."""

    def __init__(self, head: PoolingHead, spans: list[PooledSpan]) -> None:
        self._head = head
        self._spans = [span for span in spans if span.sequence.method is not PoolingMethod.ALL]
        self._tokens = [span.tokens for span in spans if span.sequence.method is PoolingMethod.ALL]
        pooled = [span.tokens for span in self._spans]
        self.hidden_rows = rows_of([*pooled, *self._tokens])
        self._num_pooled_rows = sum(each.num_rows for each in pooled)
        self._ended = [index for index, span in enumerate(self._spans) if span.is_last]
        self._values: torch.Tensor | None = None  # float32 [num_ended, size], on the host
        self._token_values: torch.Tensor | None = None  # float32 [num_rows, size], on the host, of all tokens

    def take_hidden(self, hidden: torch.Tensor) -> None:
        hidden = hidden.float()
        if self._spans:
            self._pool(hidden[: self._num_pooled_rows])
        if self._tokens:
            self._token_values = to_host(self._head.forward(hidden[self._num_pooled_rows :]))

    def _pool(self, hidden: torch.Tensor) -> None:
        sums = self._sums(hidden)
        for index, span in enumerate(self._spans):
            if span.tokens.start and span.sequence.sum is not None:
                sums[index] += span.sequence.sum
            span.sequence.sum = None if span.is_last else sums[index].clone()
        if not self._ended:
            return
        ended, counts = np.array(self._ended), np.array([span.num_pooled for span in self._spans], np.float32)
        if len(ended) < len(self._spans):
            sums = sums[upload(ended, sums.device)]
        if counts.max() > 1:
            sums = sums / upload(counts[ended], sums.device)[:, None]
        self._values = to_host(self._head.forward(sums))

    def read(self, result: StepResult) -> None:
        for place, index in enumerate(self._ended):
            assert self._values is not None, "the rows have been computed"
            row = self._values[place : place + 1].numpy()
            result.reports.append(TokenReport(self._spans[index].tokens.seq_id, NAME, 0, row))
        if self._token_values is not None:
            for tokens, rows in split_rows(self._tokens, self._token_values):
                result.reports.append(TokenReport(tokens.seq_id, NAME, tokens.start, rows))

    def _sums(self, hidden: torch.Tensor) -> torch.Tensor:
        """The sum of each span's hidden states, float32 [num_rows, hidden] -> a new tensor [num_spans, hidden].

        Each is added up by itself, so that it does not depend on what else is in the step.
        """
        lengths = np.array([span.tokens.num_rows for span in self._spans])
        if lengths.max() == 1:
            return hidden.clone()
        # Their lengths are right, and checking them would wait for the device.
        on_device = upload(lengths, hidden.device)
        return torch.segment_reduce(hidden, "sum", lengths=on_device, axis=0, unsafe=True)


class PoolingFeature(Feature):
    """Has the layers after pooling."""

    name = NAME
    sequence_type = PooledSequence

    def __init__(self, pooling: PoolingConfig | None, head: PoolingHead) -> None:
        """pooling: None if the model makes no vectors"""
        self._pooling, self._head = pooling, head

    def admit(self, spec: SequenceSpec, submit: dense_pb2.Submit, stream: int) -> PooledSequence:
        if self._pooling is None:
            raise InvalidRequest("this model makes no vectors: model.runner is not pooling")
        request = pooling_pb2.PoolingRequest.FromString(spec.features[NAME])
        if request.token_head:
            raise InvalidRequest("this model has no layer of its own for tokens: it is no encoder")
        wants_all = request.all_tokens
        return PooledSequence(spec.num_prompt_tokens, PoolingMethod.ALL if wants_all else self._pooling.method)

    def max_hidden_rows(self, max_num_seqs: int, max_num_tokens: int) -> int:
        if self._pooling is None:
            return 0
        has_few = self._pooling.method in (PoolingMethod.LAST, PoolingMethod.CLS)
        return min(max_num_seqs, max_num_tokens) if has_few else max_num_tokens

    def prepare_step(self, step: StepView, rows: FeatureRows) -> PooledRows | None:
        spans = [
            span
            for index, each in zip(rows.indexes.tolist(), rows.features, strict=True)
            if (span := _span_of(step, index, each)) is not None
        ]
        return PooledRows(self._head, spans) if spans else None


def _span_of(step: StepView, index: int, sequence: SequenceFeature) -> PooledSpan | None:
    """The rows of an entry that its vector depends on; None: none."""
    assert isinstance(sequence, PooledSequence), "rows of other features are not here"
    entry, num_tokens, method = step.entries[index], sequence.num_prompt_tokens, sequence.method
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
