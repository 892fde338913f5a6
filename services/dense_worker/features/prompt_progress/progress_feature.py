"""`ProgressFeature`: sequences that report which tokens of their prompts are computed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from services.dense_worker.features.feature import Feature
from services.dense_worker.features.report import TokenReport
from services.dense_worker.features.sequence_feature import PromptReport
from services.dense_worker.features.step_part import FeatureRows, StepPart, StepView
from services.dense_worker.features.token_rows import TokenRows, prompt_tokens

if TYPE_CHECKING:
    from services.pb import dense_pb2
    from services.step import SequenceSpec, StepResult


class SequenceProgress(PromptReport):
    """Cached tokens need not be computed for it."""

    name = "progress"


class ProgressRows(StepPart):
    """The tokens of prompts in a step; nothing is copied."""

    def __init__(self, tokens: list[TokenRows]) -> None:
        self._tokens = tokens

    def read(self, result: StepResult) -> None:
        for each in self._tokens:
            rows = np.empty((each.num_rows, 0), np.uint8)
            result.reports.append(TokenReport(each.seq_id, SequenceProgress.name, each.start, rows))


class ProgressFeature(Feature):
    """Has no state of its own."""

    name = SequenceProgress.name
    sequence_type = SequenceProgress

    def admit(self, spec: SequenceSpec, submit: dense_pb2.Submit, stream: int) -> SequenceProgress | None:
        """Nothing for a sequence with output: its prompt has been computed."""
        return None if submit.output_token_ids else SequenceProgress(spec, submit)

    def prepare_step(self, step: StepView, rows: FeatureRows) -> ProgressRows | None:
        tokens = prompt_tokens(step, rows)
        return ProgressRows(tokens) if tokens else None
