"""`PromptEmbedsFeature`: sequences with vectors in place of some tokens of their prompts."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch

from services.dense_worker.backends import InputEmbeds
from services.dense_worker.features.feature import Feature
from services.dense_worker.features.prompt_embeds.embeds_loader import EmbedsLoader, LoadedEmbeds, ReceivedEmbeds
from services.dense_worker.features.sequence_feature import SequenceFeature
from services.dense_worker.features.step_part import FeatureRows, StepPart, StepView
from services.step import SequenceSpec

if TYPE_CHECKING:
    from services.pb import dense_pb2

_ANY_TOKEN = 0  # a valid id for rows whose embeddings are replaced


class SequenceEmbeds(SequenceFeature):
    """Holds the vectors. Its token ids beyond the vocabulary stand for them, which no draft may continue."""

    allows_drafts = False

    def __init__(
        self,
        num_prompt_tokens: int,
        load: Callable[[], Awaitable[LoadedEmbeds]],
        embeds: LoadedEmbeds | None = None,
    ) -> None:
        """`load` loads the vectors if there are none yet"""
        self.num_prompt_tokens = num_prompt_tokens
        self._load = load
        self._embeds = embeds

    @property
    def embeds(self) -> LoadedEmbeds:
        assert self._embeds is not None, "they have been loaded before the sequence joins the queue"
        return self._embeds

    async def prepare(self) -> None:
        """Loads the vectors, in a thread."""
        self._embeds = await self._load()

    def vocabulary_tokens(self, token_ids: SequenceOf[int]) -> SequenceOf[int]:
        """Those that stand for no vector."""
        return self.embeds.without_rows(token_ids)


@dataclass(frozen=True, slots=True)
class EmbedsPart(StepPart):
    """A step some of whose rows have vectors."""

    input_embeds: InputEmbeds


class EmbedRows:
    """The rows of a step that stand for vectors of a prompt. Takes the tokens of one sequence after the other."""

    def __init__(self) -> None:
        self._rows: list[int] = []
        self._vectors: list[torch.Tensor] = []

    def take(self, embeds: LoadedEmbeds, token_ids: SequenceOf[int], first_row: int) -> list[int]:
        """The tokens, which have rows from `first_row`, with any valid id in place of those that stand for vectors."""
        places = [place for place, token_id in enumerate(token_ids) if token_id >= embeds.first_token_id]
        if not places:
            return list(token_ids)
        self._rows += [first_row + place for place in places]
        self._vectors.append(embeds.rows[[token_ids[place] - embeds.first_token_id for place in places]])
        return [token_id if token_id < embeds.first_token_id else _ANY_TOKEN for token_id in token_ids]

    def gather(self) -> InputEmbeds | None:
        """All rows that have vectors; None if there are none."""
        if not self._rows:
            return None
        return InputEmbeds(torch.tensor(self._rows, dtype=torch.int64), torch.cat(self._vectors))


class PromptEmbedsFeature(Feature):
    """Collects the vectors that gateways send, in parts, before the first sequence that has them."""

    name = "prompt_embeds"
    sequence_type = SequenceEmbeds
    message = "prompt_embeds_part"

    def __init__(self, loader: EmbedsLoader) -> None:
        self._loader = loader
        self._received: dict[int, ReceivedEmbeds] = {}  # by the number of the stream

    def admit(self, spec: SequenceSpec, submit: dense_pb2.Submit, stream: int) -> SequenceEmbeds:
        """The vectors that the spec names, which the stream has sent."""
        assert spec.prompt_embeds is not None, "it asks for them"
        received = self._received.get(stream, ReceivedEmbeds())
        return SequenceEmbeds(spec.num_prompt_tokens, partial(self._loader.load, spec.prompt_embeds, received))

    def receive(self, message: dense_pb2.GatewayMessage, stream: int) -> None:
        """Keeps the vectors that a stream has sent last."""
        received = self._received.get(stream, ReceivedEmbeds())
        self._received[stream] = received.with_part(message.prompt_embeds_part)

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
            step.token_ids[first_row : first_row + len(known)] = found.take(feature.embeds, known, first_row)
        input_embeds = found.gather()
        return None if input_embeds is None else EmbedsPart(input_embeds)
