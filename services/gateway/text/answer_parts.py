"""`AnswerParts`: puts the deltas of an answer together: texts, reasoning and calls, in the order of the answer."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from services.gateway.text.deltas import CallArguments, CallBegin, CallEnd, ContentDelta, Delta, ReasoningDelta


@dataclass(slots=True)
class TextPart:
    """Text for the user."""

    text: str


@dataclass(slots=True)
class ReasoningPart:
    """Reasoning."""

    text: str


@dataclass(slots=True)
class ToolCall:
    """A call. `arguments` is the text of a JSON object, unless the answer was cut off within it."""

    call_id: str
    name: str
    arguments: str = ""


Part = TextPart | ReasoningPart | ToolCall


@dataclass(slots=True)
class AnswerParts:
    """The parts of one answer. A call that turned out to be malformed is text."""

    parts: list[Part] = field(default_factory=list)
    _pieces: list[str] = field(default_factory=list)  # of the last part

    def add(self, deltas: Iterable[Delta]) -> None:
        """Appends deltas."""
        for delta in deltas:
            last = self.parts[-1] if self.parts else None
            if isinstance(delta, ContentDelta):
                if not isinstance(last, TextPart):
                    self._begin(TextPart(""))
                self._pieces.append(delta.text)
            elif isinstance(delta, ReasoningDelta):
                if not isinstance(last, ReasoningPart):
                    self._begin(ReasoningPart(""))
                self._pieces.append(delta.text)
            elif isinstance(delta, CallBegin):
                self._begin(ToolCall(delta.call_id, delta.name))
            elif isinstance(delta, CallArguments):
                self._pieces.append(delta.text)
            elif delta.malformed is not None:
                self._replace_call(delta)

    def finish(self) -> list[Part]:
        """All parts."""
        self._join()
        return self.parts

    @property
    def calls(self) -> list[ToolCall]:
        return [part for part in self.parts if isinstance(part, ToolCall)]

    def text(self) -> str:
        """All texts together, without reasoning and calls."""
        return "".join([part.text for part in self.parts if isinstance(part, TextPart)])

    def reasoning(self) -> str:
        """All reasoning together."""
        return "".join([part.text for part in self.parts if isinstance(part, ReasoningPart)])

    def _begin(self, part: Part) -> None:
        self._join()
        self.parts.append(part)

    def _join(self) -> None:
        joined, self._pieces = "".join(self._pieces), []
        last = self.parts[-1] if self.parts else None
        if isinstance(last, ToolCall):
            last.arguments += joined
        elif last is not None:
            last.text += joined

    def _replace_call(self, end: CallEnd) -> None:
        self._pieces = []
        self.parts.pop()
        if not (self.parts and isinstance(self.parts[-1], TextPart)):
            self.parts.append(TextPart(""))
        self._pieces.append(end.malformed or "")
