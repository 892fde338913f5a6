"""`TokenMassFeature`: sequences that report how likely given tokens were together at the place of each output token."""

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
from services.pb import token_mass_pb2

if TYPE_CHECKING:
    from services.pb import dense_pb2
    from services.step import SequenceSpec, StepResult

NAME = "token_mass"


class SequenceTokenMass(SequenceFeature):
    """Each output token is reported; indexes are those among the output tokens."""

    reports = True

    def __init__(self, num_prompt_tokens: int, token_ids: list[int]) -> None:
        self.num_prompt_tokens = num_prompt_tokens
        self.token_ids = token_ids


class TokenMassRows(StepPart):
    """The sampled rows of a step, and the tokens that are summed in each."""

    def __init__(self, sampled: list[tuple[SampledRows, list[int]]]) -> None:
        self._sampled = sampled
        self._values: list[torch.Tensor] = []  # float32 [num_rows] of each, on the host

    def copy_logits(self, logits: torch.Tensor) -> None:
        for rows, token_ids in self._sampled:
            logprobs = logits[rows.first_row : rows.first_row + rows.num_rows].log_softmax(-1)
            given = logprobs[:, upload(np.array(token_ids), logits.device)]
            self._values.append(to_host(given.exp().sum(-1)))

    def read(self, result: StepResult) -> None:
        """Reports the rows of accepted tokens only."""
        for (rows, _), values in zip(self._sampled, self._values, strict=True):
            if num_tokens := result.token_ids.counts.item(rows.index):
                result.reports.append(TokenReport(rows.seq_id, NAME, rows.start, values[:num_tokens, None].numpy()))


class TokenMassFeature(Feature):
    """Has no state of its own."""

    name = NAME
    sequence_type = SequenceTokenMass

    def admit(self, spec: SequenceSpec, submit: dense_pb2.Submit, stream: int) -> SequenceTokenMass | None:
        if (request := spec.features.get(NAME)) is None:
            return None
        token_ids = token_mass_pb2.TokenMassRequest.FromString(request).token_ids
        return SequenceTokenMass(spec.num_prompt_tokens, list(token_ids))

    def prepare_step(self, step: StepView, rows: FeatureRows) -> TokenMassRows | None:
        sampled = []
        for index, feature in zip(rows.indexes.tolist(), rows.features, strict=True):
            assert isinstance(feature, SequenceTokenMass)
            if (found := sampled_rows(step, index, feature.num_prompt_tokens)) is not None:
                sampled.append((found, feature.token_ids))
        return TokenMassRows(sampled) if sampled else None
