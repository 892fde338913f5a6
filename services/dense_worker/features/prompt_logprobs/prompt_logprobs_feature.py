"""`PromptLogprobsFeature`: sequences that report the log-probabilities of the tokens of their prompts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from services.dense_worker.features.feature import Feature
from services.dense_worker.features.prompt_logprobs.ranked_spans import (
    PromptSpan,
    RankedSpans,
    SequencePromptLogprobs,
    find_span,
    rank_prompt_tokens,
)
from services.dense_worker.features.report import TokenReport
from services.dense_worker.features.step_part import FeatureRows, FurtherRows, StepPart, StepView

if TYPE_CHECKING:
    from services.pb import dense_pb2
    from services.step import SequenceSpec, StepResult


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
