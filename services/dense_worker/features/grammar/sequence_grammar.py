"""`SequenceGrammar`: the grammar of a sequence with structured output."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from collections.abc import Sequence as SequenceOf

from services.dense_worker.features.sequence_feature import SequenceFeature
from services.grammar.matcher import GrammarMatcher


class SequenceGrammar(SequenceFeature):
    """Holds the matcher, which follows the output as soon as the host knows its tokens."""

    forces_tokens = True

    def __init__(
        self, field_name: str, make: Callable[[], Awaitable[GrammarMatcher]], matcher: GrammarMatcher | None = None
    ) -> None:
        """field_name: of the client's request, which gave the grammar; `make` makes the matcher if there is none yet"""
        self.field_name = field_name
        self._make = make
        self._matcher = matcher

    @property
    def matcher(self) -> GrammarMatcher:
        assert self._matcher is not None, "the grammar has been compiled before the sequence joins the queue"
        return self._matcher

    @property
    def host_s(self) -> float:
        """Of its masks and of following its tokens."""
        return 0.0 if self._matcher is None else self._matcher.step_s

    @property
    def forced_token_ids(self) -> SequenceOf[int]:
        """Those that the grammar leaves no choice for, but the last of a text."""
        return self.matcher.forced_tokens

    async def prepare(self) -> None:
        """Compiles the grammar, in a thread."""
        self._matcher = await self._make()

    def restore(self, output_token_ids: SequenceOf[int]) -> None:
        """Makes the matcher follow this output."""
        self.matcher.sync(output_token_ids)

    def fork(self) -> SequenceGrammar:
        """No sequence with a grammar is forked after its prompt."""
        raise AssertionError("a fork would need a grammar of its own")
