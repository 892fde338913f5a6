"""`PromptEmbedsFeature`: sequences with vectors in place of some tokens of their prompts."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch

from services.dense_worker.backends import InputEmbeds
from services.dense_worker.features.feature import Feature
from services.dense_worker.features.prompt_embeds.embed_rows import EmbedRows
from services.dense_worker.features.prompt_embeds.embeds_loader import EmbedsLoader, ReceivedEmbeds
from services.dense_worker.features.prompt_embeds.sequence_embeds import SequenceEmbeds
from services.dense_worker.features.step_part import FeatureRows, StepPart, StepView
from services.step import SequenceSpec

if TYPE_CHECKING:
    from services.pb import dense_pb2


@dataclass(frozen=True, slots=True)
class EmbedsPart(StepPart):
    """A step some of whose rows have vectors."""

    input_embeds: InputEmbeds


class PromptEmbedsFeature(Feature):
    """Collects the vectors that gateways send, in parts, before the first sequence that has them."""

    sequence_type = SequenceEmbeds
    message = "prompt_table_part"

    def __init__(self, loader: EmbedsLoader) -> None:
        self._loader = loader
        self._received: dict[int, ReceivedEmbeds] = {}  # by the number of the stream

    def admit(self, spec: SequenceSpec, submit: dense_pb2.Submit, stream: int) -> SequenceEmbeds | None:
        """The vectors that the spec names, which the stream has sent."""
        if spec.prompt_table is None:
            return None
        received = self._received.get(stream, ReceivedEmbeds())
        return SequenceEmbeds(spec.num_prompt_tokens, partial(self._loader.load, spec.prompt_table, received))

    def receive(self, message: dense_pb2.GatewayMessage, stream: int) -> None:
        """Keeps the vectors that a stream has sent last."""
        received = self._received.get(stream, ReceivedEmbeds())
        self._received[stream] = received.with_part(message.prompt_table_part)

    def end_stream(self, stream: int) -> None:
        """Forgets what the stream has sent."""
        self._received.pop(stream, None)

    def prepare_step(self, step: StepView, rows: FeatureRows) -> EmbedsPart | None:
        """Finds the rows with vectors, and replaces their token ids by those of any token."""
        found, entries = EmbedRows(), step.entries
        num_prompt_tokens = np.array([each.num_prompt_tokens for each in rows.features])
        in_prompt = np.flatnonzero(entries.positions[rows.indexes] < num_prompt_tokens).tolist()
        for index, feature in ((rows.indexes.item(each), rows.features[each]) for each in in_prompt):
            position, first_row = entries.positions.item(index), step.row_starts.item(index)
            known = step.known[index][position : position + entries.num_tokens.item(index)]
            step.token_ids[first_row : first_row + len(known)] = torch.tensor(
                found.take(feature.embeds, known, first_row), dtype=torch.int64
            )
        input_embeds = found.gather()
        return None if input_embeds is None else EmbedsPart(input_embeds)
