"""`PromptReport`: what a sequence has of a feature that reports something of each token of its prompt."""

from __future__ import annotations

from typing import TYPE_CHECKING

from services.dense_worker.features.sequence_feature import SequenceFeature

if TYPE_CHECKING:
    from services.dense_worker.features.report import TokenReport
    from services.pb import dense_pb2
    from services.step import SequenceSpec


class PromptReport(SequenceFeature):
    """Ends with the prompt: then the sequence is like any other. Each such feature has a subclass."""

    name: str  # of the feature

    def __init__(self, spec: SequenceSpec, submit: dense_pb2.Submit) -> None:
        """submit: the message that the spec is from, which says what has arrived before a worker died"""
        self.spec = spec
        self.is_over = submit.num_reported.get(self.name, 0) >= spec.num_prompt_tokens

    @property
    def reports(self) -> bool:
        return not self.is_over

    @property
    def reports_prompt(self) -> bool:
        return not self.is_over

    def note_reported(self, report: TokenReport) -> None:
        if report.feature == self.name and report.end == self.spec.num_prompt_tokens:
            self.is_over = True
