"""`HiddenStatesFeature`: sequences that report the last hidden state of each token that they compute."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from services.dense_worker.features.feature import Feature
from services.dense_worker.features.report import TokenReport
from services.dense_worker.features.sequence_feature import SequenceFeature
from services.dense_worker.features.step_part import FeatureRows, FurtherRows, StepPart, StepView
from services.dense_worker.features.token_rows import TokenRows, computed_tokens, copy_rows, split_rows

if TYPE_CHECKING:
    from services.pb import dense_pb2
    from services.step import SequenceSpec, StepResult

NAME = "hidden_states"


class SequenceHiddenStates(SequenceFeature):
    """All tokens are computed and reported, again if the sequence is computed again."""

    reports = True
    reports_prompt = True
    ignores_prefix_cache = True


class HiddenStateRows(StepPart):
    """The states of a step's tokens, after the final norm."""

    needs_further_rows = True

    def __init__(self, tokens: list[TokenRows]) -> None:
        self._tokens = tokens
        self._values: torch.Tensor | None = None  # float32 [num_tokens, hidden], on the host

    def compute_rows(self, further: FurtherRows) -> None:
        def hidden_states(rows: torch.Tensor) -> torch.Tensor:
            attn_out, residual = further.attn_out, further.residual
            hidden = torch.empty(len(rows), residual.shape[1], dtype=attn_out.dtype, device=attn_out.device)
            further.backend.last(attn_out, residual, rows, hidden)
            return hidden

        self._values = copy_rows(hidden_states, self._tokens, further)

    def read(self, result: StepResult) -> None:
        assert self._values is not None, "the rows have been computed"
        for tokens, rows in split_rows(self._tokens, self._values):
            result.reports.append(TokenReport(tokens.seq_id, NAME, tokens.start, rows))


class HiddenStatesFeature(Feature):
    """Has no state of its own."""

    name = NAME
    sequence_type = SequenceHiddenStates

    def admit(self, spec: SequenceSpec, submit: dense_pb2.Submit, stream: int) -> SequenceHiddenStates | None:
        return SequenceHiddenStates() if NAME in spec.features else None

    def prepare_step(self, step: StepView, rows: FeatureRows) -> HiddenStateRows:
        return HiddenStateRows([computed_tokens(step, index) for index in rows.indexes.tolist()])
