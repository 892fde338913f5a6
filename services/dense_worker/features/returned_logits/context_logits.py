"""`ContextLogitsFeature`: sequences that report the logits after each token of their prompts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from services.dense_worker.features.feature import Feature
from services.dense_worker.features.report import TokenReport
from services.dense_worker.features.sequence_feature import PromptReport
from services.dense_worker.features.step_part import FeatureRows, FurtherRows, StepPart, StepView
from services.dense_worker.features.token_rows import TokenRows, copy_rows, prompt_tokens, split_rows

if TYPE_CHECKING:
    from services.pb import dense_pb2
    from services.step import SequenceSpec, StepResult


class SequenceContextLogits(PromptReport):
    """Until the end of the prompt all its tokens are computed."""

    name = "context_logits"

    @property
    def ignores_prefix_cache(self) -> bool:
        return not self.is_over


class ContextLogitRows(StepPart):
    """The logits after the prompts' tokens of a step."""

    needs_further_rows = True

    def __init__(self, tokens: list[TokenRows]) -> None:
        self._tokens = tokens
        self._values: torch.Tensor | None = None  # float32 [num_tokens, vocab_size], on the host

    def compute_rows(self, further: FurtherRows) -> None:
        def logits(rows: torch.Tensor) -> torch.Tensor:
            return further.backend.last(further.attn_out, further.residual, rows)

        self._values = copy_rows(logits, self._tokens, further)

    def read(self, result: StepResult) -> None:
        assert self._values is not None, "the rows have been computed"
        for tokens, rows in split_rows(self._tokens, self._values):
            result.reports.append(TokenReport(tokens.seq_id, SequenceContextLogits.name, tokens.start, rows))


class ContextLogitsFeature(Feature):
    """Has no state of its own."""

    name = SequenceContextLogits.name
    sequence_type = SequenceContextLogits

    def admit(self, spec: SequenceSpec, submit: dense_pb2.Submit, stream: int) -> SequenceContextLogits:
        return SequenceContextLogits(spec, submit)

    def prepare_step(self, step: StepView, rows: FeatureRows) -> ContextLogitRows | None:
        tokens = prompt_tokens(step, rows)
        return ContextLogitRows(tokens) if tokens else None
