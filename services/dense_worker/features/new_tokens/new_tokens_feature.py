"""`NewTokensFeature`: sequences that ask for a token, now and then, that their output does not have yet."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from services.dense_worker.features.feature import Feature
from services.dense_worker.features.new_tokens.new_token_editor import NewTokenEditor, SequenceNewTokens
from services.dense_worker.features.step_part import FeatureRows, StepPart, StepView
from services.step import SequenceSpec, StepResult

if TYPE_CHECKING:
    from services.pb import dense_pb2


@dataclass(frozen=True, slots=True)
class NewTokenRows(StepPart):
    """Adds the tokens of a step to what is known of its sequences."""

    rows: FeatureRows
    waits_for_tokens: bool  # a token that has to be new is sampled before the host knows all those before it

    def read(self, result: StepResult) -> None:
        """Each sequence gets its tokens."""
        for index, sequence in zip(self.rows.indexes.tolist(), self.rows.features, strict=True):
            sequence.output_token_ids.update(result.token_ids.of(index))


class NewTokensFeature(Feature):
    """Has no state of its own."""

    sequence_type = SequenceNewTokens
    editors = (NewTokenEditor,)

    def admit(self, spec: SequenceSpec, submit: dense_pb2.Submit, stream: int) -> SequenceNewTokens | None:
        """What the options ask for; the runner restores the output."""
        every = spec.sampling.new_token_every
        return SequenceNewTokens(every, spec.num_prompt_tokens) if every else None

    def prepare_step(self, step: StepView, rows: FeatureRows) -> NewTokenRows:
        """Where the next token has to be new, the host must know all tokens before it."""
        entries, indexes = step.entries, rows.indexes
        needed = entries.positions[indexes] + entries.num_tokens[indexes]
        every, num_prompt_tokens = np.array([(each.every, each.num_prompt_tokens) for each in rows.features]).T
        is_due = (needed - num_prompt_tokens + 1) % every == 0
        lacks_tokens = is_due & (entries.num_logits[indexes] > 0) & (step.num_known[indexes] < needed)
        return NewTokenRows(rows, bool(lacks_tokens.any()))
