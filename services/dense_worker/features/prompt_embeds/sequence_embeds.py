"""`SequenceEmbeds`: the vectors in a sequence's prompt."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from collections.abc import Sequence as SequenceOf

from services.dense_worker.features.prompt_embeds.loaded_embeds import LoadedEmbeds
from services.dense_worker.features.sequence_feature import SequenceFeature


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
