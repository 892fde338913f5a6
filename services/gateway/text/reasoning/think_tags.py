"""Reasoning between <think> and </think>, before the answer: Qwen 3, DeepSeek R1 and others."""

from __future__ import annotations

from enum import Enum, auto

from services.gateway.text.deltas import ContentDelta, Delta, ReasoningDelta
from services.gateway.text.markers import find_marker

BEGIN, END = "<think>", "</think>"
MAX_HELD_CHARACTERS = 2**15


class Beginning(Enum):
    """What an answer begins with."""

    REASONING = auto()  # the prompt ends within the reasoning, or the model always begins with it
    CONTENT = auto()  # the prompt has closed the reasoning
    EITHER = auto()  # reasoning if the answer begins with <think>


class _State(Enum):
    START = auto()
    REASONING_START = auto()  # white space and a begin marker are dropped
    REASONING = auto()
    HELD = auto()  # within the reasoning, from the marker of a call on: content if no end marker comes
    CONTENT_START = auto()  # line breaks are dropped
    CONTENT = auto()


class ThinkTags:
    """A `Parser` of reasoning and content. White space around the markers is dropped."""

    def __init__(self, beginning: Beginning, call_marker: str | None = None) -> None:
        """`call_marker`: where the model ends its answer after this marker of a call and forgets the reasoning's end,
        what follows the marker is content. It is held back until then. None: that is reasoning, too.
        """
        self._state = {
            Beginning.REASONING: _State.REASONING_START,
            Beginning.CONTENT: _State.CONTENT,
            Beginning.EITHER: _State.START,
        }[beginning]
        self._text = ""
        self._has_reasoning = False
        self._call_marker = call_marker

    @property
    def is_reasoning(self) -> bool:
        """Whether the text so far ends within the reasoning, or may."""
        return self._state in (_State.START, _State.REASONING_START, _State.REASONING, _State.HELD)

    @property
    def has_reasoning(self) -> bool:
        """Whether reasoning has begun, or certainly will."""
        return self._has_reasoning or self._state in (_State.REASONING_START, _State.REASONING, _State.HELD)

    @property
    def is_over(self) -> bool:
        """Whether everything that follows is content, as it is."""
        return self._state is _State.CONTENT and not self._text

    def feed(self, text: str) -> list[Delta]:
        deltas: list[Delta] = []
        self._text += text
        while self._step(deltas):
            pass
        return deltas

    @property
    def is_held(self) -> bool:
        """Whether a call has begun within the reasoning."""
        return self._state is _State.HELD

    def finish(self, is_cut: bool = False) -> list[Delta]:
        text, self._text = self._text, ""
        if self._state is _State.HELD:
            return [ReasoningDelta(text.rstrip()) if is_cut else ContentDelta(text.lstrip())]
        if self._state in (_State.REASONING_START, _State.REASONING):
            text = text.rstrip() if self._state is _State.REASONING else text.strip()
            return [ReasoningDelta(text)] if text else []
        return [ContentDelta(text)] if text else []

    def _step(self, deltas: list[Delta]) -> bool:
        if self._state is _State.CONTENT:
            if self._text:
                deltas.append(ContentDelta(self._text))
                self._text = ""
            return False
        if self._state is _State.REASONING:
            return self._read_reasoning(deltas)
        if self._state is _State.HELD:
            return self._read_held(deltas)
        if self._state is _State.CONTENT_START:
            self._text = self._text.lstrip("\n")
            if self._text:
                self._state = _State.CONTENT
            return bool(self._text)
        text = self._text.lstrip()
        if text.startswith(BEGIN):
            self._text, self._state = text.removeprefix(BEGIN), _State.REASONING_START
            return True
        if BEGIN.startswith(text):
            return False
        if self._state is _State.REASONING_START:
            self._text, self._state = text, _State.REASONING
        else:
            self._state = _State.CONTENT
        return True

    def _read_reasoning(self, deltas: list[Delta]) -> bool:
        """White space before the end marker is held back, too."""
        index, marker = find_marker(self._text, (END,) if self._call_marker is None else (END, self._call_marker))
        shown = self._text[:index].rstrip()
        if shown:
            deltas.append(ReasoningDelta(shown))
        if marker != END:
            self._text = self._text[len(shown) :]
            if marker is not None:
                self._state = _State.HELD
            return marker is not None
        self._text = self._text[index + len(END) :]
        self._has_reasoning = True
        self._state = _State.CONTENT_START
        return True

    def _read_held(self, deltas: list[Delta]) -> bool:
        """Waits for the end marker, but not for ever."""
        if END not in self._text and len(self._text) <= MAX_HELD_CHARACTERS:
            return False
        self._state, self._call_marker = _State.REASONING, None
        return self._read_reasoning(deltas)
