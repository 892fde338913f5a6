"""`Parsing`: what is to be found in the answers of one request. `ChatFormats`: what a model can write.

Completions and chats without tools and reasoning have no `Parsing`: their answers are plain text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from services.common.errors import ConfigError, InvalidRequest
from services.gateway.text.deltas import CallBegin, ContentDelta, Delta, Parser
from services.gateway.text.harmony import HARMONY, MARKERS, START
from services.gateway.text.harmony.parser import Beginning as HarmonyBeginning
from services.gateway.text.harmony.parser import HarmonyParser
from services.gateway.text.reasoning.formats import ReasoningFormat, choose_reasoning_format
from services.gateway.text.reasoning.think_tags import BEGIN, END, Beginning, ThinkTags
from services.gateway.text.tools.formats import ToolFormat, choose_tool_format
from services.gateway.text.tools.tool import ToolChoice, Tools


@dataclass(frozen=True, slots=True)
class Parsing:
    """How to read the answers of one request."""

    tool_format: ToolFormat | None  # None: no calls
    tools: Tools
    beginning: Beginning | None  # None: reasoning is not separated
    harmony: HarmonyBeginning | None = None  # the answer is in Harmony, which has reasoning and calls of its own
    has_grammar: bool = False  # whether the request gives the answer a grammar, which it has unless it is calls
    keeps_reasoning: bool = False  # as content, with its markers

    def make_parser(self) -> AnswerParser:
        """The parser of one answer."""
        if self.harmony is not None:
            return HarmonyParser(self.harmony, may_call=self.tool_format is not None)
        if self.tool_format is None:
            return TaggedAnswer(self._reasoning(None), None, has_grammar=self.has_grammar)
        calls, marker = self.tool_format.make_parser(self.tools.callable), self.tool_format.markers[0]
        has_strict = any(each.is_strict for each in self.tools.callable)
        is_free = not (self.has_grammar or self.tools.is_demanded or has_strict)
        return TaggedAnswer(self._reasoning(marker if is_free else None), calls, has_grammar=self.has_grammar)

    def _reasoning(self, call_marker: str | None) -> ThinkTags:
        """`call_marker`: None if a grammar holds for calls, since it begins only behind the reasoning."""
        beginning = Beginning.CONTENT if self.keeps_reasoning or self.beginning is None else self.beginning
        return ThinkTags(beginning, call_marker)

    @property
    def token_markers(self) -> Sequence[str]:
        """Markers that are tokens and never text."""
        return () if self.harmony is None else MARKERS

    @property
    def markers(self) -> frozenset[str]:
        """Special tokens that are kept in the text, since the parsers look for them."""
        if self.harmony is not None:
            return frozenset(MARKERS)
        tools = () if self.tool_format is None else self.tool_format.markers
        return frozenset((*tools, *((BEGIN, END) if self.beginning else ())))


@dataclass(frozen=True, slots=True)
class ChatFormats:
    """How the served model writes calls and reasoning; None: it does not, or nobody knows how."""

    tools: ToolFormat | None = None
    reasoning: ReasoningFormat | None = None

    @property
    def has_reasoning(self) -> bool:
        """Whether the model reasons in a way that is known."""
        return self.reasoning is not None

    @property
    def is_harmony(self) -> bool:
        """Whether answers are in Harmony."""
        return self.reasoning is not None and self.reasoning.name == HARMONY

    @classmethod
    def choose(
        cls, tool_parser: str, reasoning_parser: str, template: str | Mapping[str, Any] | None
    ) -> ChatFormats:
        """By configuration or chat template. Raises `ConfigError` if Harmony is chosen for one of the two alone."""
        text = "\n".join(map(str, template.values())) if isinstance(template, Mapping) else template or ""
        formats = cls(choose_tool_format(tool_parser, text), choose_reasoning_format(reasoning_parser, text))
        if formats.tools is not None and (formats.tools.name == HARMONY) != formats.is_harmony:
            reasoning = "none" if formats.reasoning is None else formats.reasoning.name
            raise ConfigError(
                f"gateway.tool_parser {tool_parser!r} means {formats.tools.name} and gateway.reasoning_parser "
                f"{reasoning_parser!r} means {reasoning}: harmony has both, set both to harmony or neither"
            )
        return formats

    def check(self, tools: Tools) -> None:
        """Raises `InvalidRequest` if the model cannot be given tools."""
        if tools.choice is not ToolChoice.NONE and self.tools is None:
            raise InvalidRequest(
                "tools are not supported by this model: its chat template has no known format of calls, and "
                "gateway.tool_parser names none",
                "tools",
            )

    def parsing(self, tools: Tools, prompt_end: str, open_message: str | None) -> Parsing | None:
        """How to read the answers to a chat; None if they are plain text. See `ReasoningFormat.beginning`."""
        tool_format = None if tools.choice is ToolChoice.NONE else self.tools
        if self.is_harmony:
            return Parsing(tool_format, tools, None, _harmony_beginning(prompt_end, open_message))
        beginning = None if self.reasoning is None else self.reasoning.beginning(prompt_end, open_message)
        if tool_format is None and beginning is None:
            return None
        return Parsing(tool_format, tools, beginning)


def _harmony_beginning(prompt_end: str, open_message: str | None) -> HarmonyBeginning:
    if open_message is not None:
        return HarmonyBeginning.CONTENT
    return HarmonyBeginning.HEADER if prompt_end.endswith(f"{START}assistant") else HarmonyBeginning.MESSAGE


class AnswerParser(Protocol):
    """Reads one answer token by token: finds content, reasoning and calls in it."""

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
    """That of models that write tags into plain text: reasoning between them, then content with calls in it."""

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
