"""`ReturnedLogitsFeature`: sequences that report logits, hidden states or log-probabilities of their prompts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from services.dense_worker.features.feature import Feature
from services.dense_worker.features.returned_logits.reported_rows import ReportedRows
from services.dense_worker.features.returned_logits.sequence_reports import SequenceReports
from services.dense_worker.features.step_part import FeatureRows, StepView
from services.step import SequenceSpec, TokenReport

if TYPE_CHECKING:
    from services.pb import dense_pb2


class ReturnedLogitsFeature(Feature):
    """Has no state of its own."""

    sequence_type = SequenceReports

    def admit(self, spec: SequenceSpec, submit: dense_pb2.Submit, stream: int) -> SequenceReports | None:
        """What the spec asks for, less what has arrived at the gateway before a worker died."""
        prompt_logprobs = spec.num_prompt_logprobs is not None and not submit.has_prompt_logprobs
        token_report = TokenReport(submit.token_report)
        if not (prompt_logprobs or token_report or spec.return_generation_logits):
            return None
        return SequenceReports(spec, prompt_logprobs=prompt_logprobs, token_report=token_report)

    def prepare_step(self, step: StepView, rows: FeatureRows) -> ReportedRows | None:
        """The rows that are reported."""
        return ReportedRows.of(step, rows)
