"""`AnswerParser`: reads one answer token by token. `TaggedAnswer` is that of models that write tags into plain text."""

from __future__ import annotations

from typing import Protocol

from services.gateway.text.deltas import CallBegin, ContentDelta, Delta, Parser
from services.gateway.text.reasoning.think_tags import ThinkTags


class AnswerParser(Protocol):
    """Finds content, reasoning and calls in the tokens of one answer."""

    @property
    def num_reasoning_tokens(self) -> int:
        """Tokens of the reasoning so far, its markers included."""

    def feed_token(self, text: str, marker: str | None) -> list[Delta]:
        """The deltas that a token completes.

        `text`: what it adds to the text. `marker`: its name if it is a special token of the format, which then is not
        in `text`.
        """

    def finish(self, rest: str, is_cut: bool) -> list[Delta]:
        """The deltas at the end. `rest`: incomplete text. `is_cut`: a limit ended the answer, not the model."""


class TaggedAnswer:
    """Reasoning between tags, then content with calls in it."""

    def __init__(self, reasoning: ThinkTags, calls: Parser | None, *, has_grammar: bool) -> None:
        """`calls`: None if the answer may have none. `has_grammar`: of the content, so that it is calls or has none."""
        self._reasoning, self._calls = reasoning, calls
        self._is_undecided = has_grammar  # whether the content, of which nothing has been seen yet, is calls
        self._num_tokens = 0  # of the reasoning, if there is any
        self._num_held = 0  # of them, those of what may be a call

    @property
    def num_reasoning_tokens(self) -> int:
        return self._num_tokens if self._reasoning.has_reasoning else 0

    def feed_token(self, text: str, marker: str | None) -> list[Delta]:
        """Tags are found in the text, whatever the tokens: `marker` is None."""
        self._num_tokens += self._reasoning.is_reasoning
        found = self._parse(text)
        self._num_held = self._num_held + 1 if self._reasoning.is_held else 0
        return found

    def finish(self, rest: str, is_cut: bool) -> list[Delta]:
        found = self._parse(rest)
        if self._reasoning.is_held and not is_cut:
            self._num_tokens -= self._num_held
        found += self._parse_content(self._reasoning.finish(is_cut))
        return found if self._calls is None else found + self._calls.finish(is_cut)

    def _parse(self, text: str) -> list[Delta]:
        return self._parse_content(self._reasoning.feed(text)) if text else []

    def _parse_content(self, deltas: list[Delta]) -> list[Delta]:
        """Looks for calls in the content."""
        found: list[Delta] = []
        for delta in deltas:
            found += self._find_calls(delta) if isinstance(delta, ContentDelta) else [delta]
        return found

    def _find_calls(self, content: ContentDelta) -> list[Delta]:
        found, index = list[Delta](), 0
        while self._calls is not None and self._is_undecided and index < len(content.text):
            new = self._calls.feed(content.text[index])  # one character, so that the first one of a grammar decides
            index += 1
            self._is_undecided = not any(isinstance(each, CallBegin) for each in new)
            if any(isinstance(each, ContentDelta) and not each.text.isspace() for each in new):
                new += self._calls.finish()
                self._calls = None
            found += new
        rest = content.text[index:]
        if self._calls is not None:
            return found + self._calls.feed(rest) if rest else found
        return [*found, ContentDelta(rest)] if rest else found
