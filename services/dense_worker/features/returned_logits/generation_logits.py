"""`GenerationLogitsFeature`: sequences that report the logits from which their output tokens were sampled."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from services.dense_worker.features.feature import Feature
from services.dense_worker.features.report import TokenReport
from services.dense_worker.features.sequence_feature import SequenceFeature
from services.dense_worker.features.step_part import FeatureRows, StepPart, StepView
from services.dense_worker.features.token_rows import SampledRows, sampled_rows
from services.dense_worker.sampling.logprobs import to_host
from services.dense_worker.sampling.upload import upload

if TYPE_CHECKING:
    from services.pb import dense_pb2
    from services.step import SequenceSpec, StepResult

NAME = "generation_logits"


class SequenceGenerationLogits(SequenceFeature):
    """Each output token is reported; indexes are those among the output tokens."""

    reports = True

    def __init__(self, num_prompt_tokens: int) -> None:
        self.num_prompt_tokens = num_prompt_tokens


class GenerationLogitRows(StepPart):
    """The sampled rows of a step, as the model has computed them."""

    def __init__(self, sampled: list[SampledRows]) -> None:
        self._sampled = sampled
        self._values: torch.Tensor | None = None  # float32 [num_rows, vocab_size], on the host

    def copy_logits(self, logits: torch.Tensor) -> None:
        rows = [np.arange(each.first_row, each.first_row + each.num_rows) for each in self._sampled]
        self._values = to_host(logits[upload(np.concatenate(rows), logits.device)].float())

    def read(self, result: StepResult) -> None:
        """Reports the rows of accepted tokens only."""
        assert self._values is not None, "the rows have been copied"
        end = 0
        for sampled in self._sampled:
            begin, end = end, end + sampled.num_rows
            if num_tokens := result.token_ids.counts.item(sampled.index):
                rows = self._values[begin : begin + num_tokens].numpy()
                result.reports.append(TokenReport(sampled.seq_id, NAME, sampled.start, rows))


class GenerationLogitsFeature(Feature):
    """Has no state of its own."""

    name = NAME
    sequence_type = SequenceGenerationLogits

    def admit(self, spec: SequenceSpec, submit: dense_pb2.Submit, stream: int) -> SequenceGenerationLogits:
        return SequenceGenerationLogits(spec.num_prompt_tokens)

    def prepare_step(self, step: StepView, rows: FeatureRows) -> GenerationLogitRows | None:
        sampled = []
        for index, feature in zip(rows.indexes.tolist(), rows.features, strict=True):
            assert isinstance(feature, SequenceGenerationLogits)
            if (found := sampled_rows(step, index, feature.num_prompt_tokens)) is not None:
                sampled.append(found)
        return GenerationLogitRows(sampled) if sampled else None
