"""`PromptLogprobsFeature`: sequences that report the log-probabilities of the tokens of their prompts.

The row of each token predicts the next token. A step computes a span of a prompt. Sampling needs the logits of only one
row per sequence; here they are computed for all rows of the span, some rows at a time, so that memory stays limited
however long the span is.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from services.dense_worker.features.feature import Feature
from services.dense_worker.features.report import TokenReport
from services.dense_worker.features.sequence_feature import PromptReport
from services.dense_worker.features.step_part import FeatureRows, FurtherRows, StepPart, StepView
from services.dense_worker.features.token_rows import MAX_ROWS_AT_A_TIME
from services.dense_worker.sampling.logprobs import RankedTokens, concatenate, rank_tokens
from services.dense_worker.sampling.upload import upload
from services.pb import prompt_logprobs_pb2

if TYPE_CHECKING:
    from services.pb import dense_pb2
    from services.step import PlanEntry, SequenceSpec, StepResult

MAX_SHARED_TOP = 32  # prompts that report more most likely tokens do not make all others of the step compute as many


class SequencePromptLogprobs(PromptReport):
    """How many log-probabilities a sequence reports of each token of its prompt."""

    name = "prompt_logprobs"

    def __init__(self, spec: SequenceSpec, submit: dense_pb2.Submit) -> None:
        super().__init__(spec, submit)
        request = prompt_logprobs_pb2.PromptLogprobsRequest.FromString(spec.features[self.name])
        self.num_likeliest = request.num_likeliest
        self.named = spec.sampling.logprob_token_ids  # reported with each token, too
        if spec.num_prompt_tokens == 1:
            self.is_over = True  # nothing precedes the first token

    @property
    def num_values_per_token(self) -> int:
        return 0 if self.is_over else 1 + self.num_likeliest + len(self.named)

    @property
    def ignores_prefix_cache(self) -> bool:
        return not self.is_over


class PromptLogprobsFeature(Feature):
    """Has no state of its own."""

    name = SequencePromptLogprobs.name
    sequence_type = SequencePromptLogprobs

    def admit(self, spec: SequenceSpec, submit: dense_pb2.Submit, stream: int) -> SequencePromptLogprobs:
        return SequencePromptLogprobs(spec, submit)

    def prepare_step(self, step: StepView, rows: FeatureRows) -> PromptLogprobRows | None:
        spans = []
        for index, feature in zip(rows.indexes.tolist(), rows.features, strict=True):
            assert isinstance(feature, SequencePromptLogprobs)
            if feature.is_over:
                continue
            if (span := find_span(step.entries[index], feature, step.row_starts.item(index))) is not None:
                spans.append(span)
        return PromptLogprobRows(spans) if spans else None


class PromptLogprobRows(StepPart):
    """The tokens of prompts that a step ranks."""

    needs_further_rows = True

    def __init__(self, spans: list[PromptSpan]) -> None:
        self._spans = spans
        self._ranked: RankedSpans | None = None

    def compute_rows(self, further: FurtherRows) -> None:
        self._ranked = rank_prompt_tokens(further, self._spans).to_host()

    def read(self, result: StepResult) -> None:
        assert self._ranked is not None, "the tokens have been ranked"
        for span, rows in self._ranked.rows():
            result.reports.append(TokenReport(span.seq_id, SequencePromptLogprobs.name, span.start, rows))


@dataclass(frozen=True, slots=True)
class PromptSpan:
    """The prompt tokens whose log-probabilities a step computes."""

    seq_id: int
    start: int  # index in the prompt of the first one, at least 1
    token_ids: SequenceOf[int]
    first_row: int  # row of the step that predicts the first token; the next row predicts the next
    num_likeliest: int  # most likely tokens to report with each
    named: SequenceOf[int]  # further tokens to report with each


def find_span(entry: PlanEntry, asked: SequencePromptLogprobs, first_row: int) -> PromptSpan | None:
    """The span of an entry whose tokens begin at `first_row`; None if it predicts no token of the prompt."""
    start = entry.position + 1
    token_ids = tuple(asked.spec.prompt_token_ids[start : start + entry.num_tokens])
    if not token_ids:
        return None
    return PromptSpan(entry.seq_id, start, token_ids, first_row, asked.num_likeliest, asked.named)


@dataclass(frozen=True, slots=True)
class RankedSpans:
    """Spans and what is reported of their tokens. The parts differ in how many most likely tokens they have."""

    parts: SequenceOf[tuple[SequenceOf[PromptSpan], RankedTokens]]

    def to_host(self) -> RankedSpans:
        """See `RankedTokens.to_host`."""
        return RankedSpans([(spans, ranked.to_host()) for spans, ranked in self.parts])

    def rows(self) -> Iterator[tuple[PromptSpan, np.ndarray]]:
        """The rows of each span when they have been copied to the host: uint32, as `PromptLogprobsRequest` says."""
        for spans, ranked in self.parts:
            end = 0
            for span in spans:
                begin, end = end, end + len(span.token_ids)
                yield span, _encode_rows(ranked, slice(begin, end), span.num_likeliest, span.named)


def rank_prompt_tokens(further: FurtherRows, spans: SequenceOf[PromptSpan]) -> RankedSpans:
    """Ranks the tokens of the spans: one row per token."""
    groups: dict[int, list[PromptSpan]] = {}  # all rows of a group have as many most likely tokens as its widest one
    for span in spans:
        groups.setdefault(span.num_likeliest if span.num_likeliest > MAX_SHARED_TOP else 0, []).append(span)
    return RankedSpans([(group, _rank_group(further, group)) for group in groups.values()])


def _rank_group(further: FurtherRows, spans: SequenceOf[PromptSpan]) -> RankedTokens:
    rows, token_ids = [], []
    named: list[SequenceOf[int]] = []
    for span in spans:
        rows.append(np.arange(span.first_row, span.first_row + len(span.token_ids)))
        token_ids += span.token_ids
        named += [span.named] * len(span.token_ids)
    packed = np.stack([np.concatenate(rows), np.array(token_ids, dtype=np.int64)])
    device_rows, device_token_ids = upload(packed, further.attn_out.device)
    num_top = max(span.num_likeliest for span in spans)
    width = max(map(len, named))
    size = min(MAX_ROWS_AT_A_TIME, further.max_num_rows)
    return concatenate(
        rank_tokens(
            further.backend.last(further.attn_out, further.residual, device_rows[start : start + size]),
            device_token_ids[start : start + size],
            num_top,
            named[start : start + size] if width else None,
            width,
        )
        for start in range(0, len(token_ids), size)
    )


def _encode_rows(ranked: RankedTokens, rows: slice, num_likeliest: int, named: SequenceOf[int]) -> np.ndarray:
    def integers(values: torch.Tensor) -> np.ndarray:
        return values.numpy().astype(np.uint32)

    def floats(values: torch.Tensor) -> np.ndarray:
        return np.ascontiguousarray(values.numpy()).view(np.uint32)

    num_rows = rows.stop - rows.start
    columns = (
        floats(ranked.logprobs[rows, None]),
        integers(ranked.ranks[rows, None]),
        integers(ranked.top_token_ids[rows, :num_likeliest]),
        np.tile(np.array(named, np.uint32), (num_rows, 1)),
        floats(ranked.top_logprobs[rows, :num_likeliest]),
        floats(ranked.named_logprobs[rows, : len(named)]),
    )
    return np.concatenate(columns, axis=1)
