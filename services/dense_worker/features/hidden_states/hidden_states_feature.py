"""`HiddenStatesFeature`: sequences that report the last hidden state of each token that they compute."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from services.dense_worker.features.feature import Feature
from services.dense_worker.features.report import TokenReport
from services.dense_worker.features.sequence_feature import SequenceFeature
from services.dense_worker.features.step_part import FeatureRows, StepPart, StepView
from services.dense_worker.features.token_rows import TokenRows, computed_tokens, rows_of, split_rows, to_host

if TYPE_CHECKING:
    from services.pb import dense_pb2
    from services.step import SequenceSpec, StepResult

NAME = "hidden_states"
OF_ANSWER = b"answer"  # asks for those of the answer's tokens alone; b"": all


class SequenceHiddenStates(SequenceFeature):
    """Tokens are reported that are computed, again if the sequence is computed again: all, or those of the answer."""

    reports = True

    def __init__(self, start: int) -> None:
        """start: index of the first token that is reported, 0 or that of the first one of the answer"""
        self.start = start
        self.reports_prompt = self.ignores_prefix_cache = start == 0


class HiddenStateRows(StepPart):
    """The states of a step's tokens, after the final norm."""

    def __init__(self, tokens: list[TokenRows]) -> None:
        self._tokens = tokens
        self.hidden_rows = rows_of(tokens)
        self._values: torch.Tensor | None = None  # float32 [num_tokens, hidden], on the host

    def take_hidden(self, hidden: torch.Tensor) -> None:
        self._values = to_host(hidden)

    def read(self, result: StepResult) -> None:
        assert self._values is not None, "the rows have been computed"
        for tokens, rows in split_rows(self._tokens, self._values):
            result.reports.append(TokenReport(tokens.seq_id, NAME, tokens.start, rows))


class HiddenStatesFeature(Feature):
    """Has no state of its own."""

    name = NAME
    sequence_type = SequenceHiddenStates

    def admit(self, spec: SequenceSpec, submit: dense_pb2.Submit, stream: int) -> SequenceHiddenStates:
        return SequenceHiddenStates(spec.num_prompt_tokens if spec.features[NAME] == OF_ANSWER else 0)

    def prepare_step(self, step: StepView, rows: FeatureRows) -> HiddenStateRows | None:
        found = []
        for index, feature in zip(rows.indexes.tolist(), rows.features, strict=True):
            assert isinstance(feature, SequenceHiddenStates)
            tokens = computed_tokens(step, index)
            num_before = max(0, feature.start - tokens.start)
            if num_before < tokens.num_rows:
                first, num_rows = tokens.first_row + num_before, tokens.num_rows - num_before
                found.append(TokenRows(tokens.seq_id, tokens.start + num_before, first, num_rows))
        return HiddenStateRows(found) if found else None
