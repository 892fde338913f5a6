"""`HarmonyParser`: reads an answer in Harmony. Analysis is reasoning, commentary to=functions.f a call of f.

Markers are tokens and never text: a model that quotes them in plain text writes content. Broken answers lose no text:
what cannot be understood is content.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum, auto

from services.gateway.text.deltas import Delta, ReasoningDelta
from services.gateway.text.harmony import CHANNEL, CONSTRAIN, MESSAGE, START
from services.gateway.text.tools.call_writer import CallWriter
from services.gateway.text.tools.json_call import JsonArguments, MalformedCall
from services.gateway.text.tools.tool import NAME

MAX_HEADER_CHARACTERS = 512  # with markers; text that is longer is no header
TOOL_PREFIX = "functions."
_RECIPIENT = "to="
_ROLE = re.compile(r"\s*[^\s<]{0,80}")
_CHANNEL = re.compile(rf"{re.escape(CHANNEL)}\s*([A-Za-z_]{{0,32}})")
_TO = re.compile(r"to=([^\s<]{1,80})")
_CONTENT_TYPE = re.compile(rf"{re.escape(CONSTRAIN)}\s*[A-Za-z_]{{0,32}}")
_SEPARATOR = "\n"  # between two messages of one kind, which are one text for the client


class Beginning(Enum):
    """What an answer begins with."""

    MESSAGE = auto()  # the whole message, <|start|> included
    HEADER = auto()  # the rest of the header: the prompt has written <|start|> and the role
    CONTENT = auto()  # the text of the answer: the prompt has a message that the answer continues


class _State(Enum):
    BETWEEN = auto()  # messages
    HEADER = auto()
    CONTENT = auto()
    REASONING = auto()
    CALL = auto()


@dataclass(frozen=True, slots=True)
class _Header:
    """What a header says: `assistant<|channel|>commentary to=functions.f <|constrain|>json`.

    `rest` is text in it that has no meaning there, as where <|message|> was left out.
    """

    channel: str  # empty: none
    recipient: str  # of a call, such as "functions.f"; empty: none
    rest: str


class HarmonyParser:
    """An `AnswerParser`."""

    def __init__(self, beginning: Beginning, may_call: bool) -> None:
        """`may_call`: False if the answer may have no calls; their text is then content."""
        states = {Beginning.MESSAGE: _State.BETWEEN, Beginning.HEADER: _State.HEADER}
        self._state = states.get(beginning, _State.CONTENT)
        self._may_call = may_call
        self._writer = CallWriter()
        self._deltas: list[Delta] = []
        self._header, self._has_role = "", False  # the role may be in the prompt
        self._num_header_tokens = self.num_reasoning_tokens = 0
        self._call: JsonArguments | None = None
        self._name, self._raw = "", list[str]()  # of the open call; its text
        self._has_text = {_State.CONTENT: False, _State.REASONING: False}  # of a kind, in any message
        self._is_at_start = True  # of the open message

    def feed_token(self, text: str, marker: str | None) -> list[Delta]:
        is_reasoning = self._state is _State.REASONING
        self._num_header_tokens = self._num_header_tokens + 1 if self._state in (_State.HEADER, _State.BETWEEN) else 0
        if text:
            self._read(text)
        if marker is not None:
            self._read_marker(marker)
        if is_reasoning:
            self.num_reasoning_tokens += 1
        elif self._state is _State.REASONING:  # begins now: the tokens of its header count
            self.num_reasoning_tokens += self._num_header_tokens
        return self._take()

    def finish(self, rest: str, is_cut: bool) -> list[Delta]:
        if rest:
            self._read(rest)
        if self._state is _State.HEADER and not is_cut:
            self._give_up_header()
        elif self._state is _State.CALL:
            self._end_call(is_cut)
        self._writer.finish()
        return self._take()

    def _read_marker(self, marker: str) -> None:
        if self._state is _State.HEADER and marker in (CHANNEL, CONSTRAIN):
            self._header += marker
            self._check_header()
        elif self._state is _State.HEADER and marker == MESSAGE:
            self._begin(_read_header(self._header, self._has_role))
        elif self._state is _State.BETWEEN and marker == MESSAGE:
            self._begin(_Header("", "", ""))
        elif marker == START:
            self._end_message()
            self._state, self._header, self._has_role = _State.HEADER, "", True
        elif marker == CHANNEL:  # the end of a message and the beginning of the next are missing
            self._end_message()
            self._state, self._header, self._has_role = _State.HEADER, marker, False
        elif marker not in (MESSAGE, CONSTRAIN):  # one of those that end a message
            self._end_message()

    def _read(self, text: str) -> None:
        match self._state:
            case _State.BETWEEN:
                if text := text.lstrip():  # no message began
                    self._begin(_Header("", "", ""))
                    self._write(text)
            case _State.HEADER:
                room = MAX_HEADER_CHARACTERS + 1 - len(self._header)
                self._header += text[:room]
                self._check_header()
                if text[room:]:
                    self._read(text[room:])
            case _State.CALL:
                self._read_arguments(text)
            case _State.CONTENT | _State.REASONING:
                self._write(text)

    def _check_header(self) -> None:
        """Gives up a header that has become too long, or that is plain text behind a role in the prompt."""
        begun = self._header.lstrip()
        is_plain = not self._has_role and not begun.startswith((CHANNEL, CONSTRAIN, _RECIPIENT[: len(begun)]))
        if is_plain or len(self._header) > MAX_HEADER_CHARACTERS:
            self._give_up_header()

    def _give_up_header(self) -> None:
        """The header is none: begins a message with the text in it that has no meaning there."""
        header = _read_header(self._header, self._has_role)
        is_text = not self._has_role and CHANNEL not in self._header and CONSTRAIN not in self._header
        shown = self._header if is_text else header.rest
        self._begin(_Header(header.channel, "", ""))
        if shown.strip():
            self._write(shown)

    def _begin(self, header: _Header) -> None:
        """Begins the content of a message."""
        name = header.recipient.removeprefix(TOOL_PREFIX)
        self._is_at_start = True
        if self._may_call and header.recipient.startswith(TOOL_PREFIX) and NAME.fullmatch(name):
            self._state, self._name, self._raw = _State.CALL, name, []
            self._call = JsonArguments(self._writer, name)
        else:
            self._state = _State.REASONING if header.channel == "analysis" else _State.CONTENT

    def _end_message(self) -> None:
        if self._state is _State.HEADER:
            self._give_up_header()
        elif self._state is _State.CALL:
            self._end_call(is_cut=False)
        self._state = _State.BETWEEN

    def _write(self, text: str) -> None:
        """A piece of the content or of the reasoning."""
        if self._is_at_start and self._has_text[self._state]:
            text = _SEPARATOR + text
        self._is_at_start, self._has_text[self._state] = False, True
        if self._state is _State.CONTENT:
            self._writer.content(text)
            return
        self._deltas += [*self._writer.take(), ReasoningDelta(text)]

    def _read_arguments(self, text: str) -> None:
        assert self._call is not None
        if self._call.is_complete:
            if text := text.lstrip():  # no part of the call, which has ended
                self._state = _State.CONTENT
                self._write(text)
            return
        self._raw.append(text)
        try:
            index = self._call.feed(text)
        except MalformedCall:
            self._give_up_call()
            return
        if self._call.is_complete:
            self._writer.end()
            self._read_arguments(text[index:])

    def _end_call(self, is_cut: bool) -> None:
        assert self._call is not None
        if self._call.is_complete:
            return
        if is_cut:
            self._call.cut()
            self._writer.end(is_cut=True)
        elif "".join(self._raw).strip():
            self._give_up_call()
        else:  # a call without arguments
            self._writer.begin(self._name)
            self._writer.arguments("{}")
            self._writer.end()

    def _give_up_call(self) -> None:
        """The arguments are no JSON: the call and what follows in its message are content."""
        assert self._call is not None
        self._state, raw = _State.CONTENT, "".join(self._raw)
        if self._call.has_begun:
            self._writer.end(malformed=raw)
            self._is_at_start, self._has_text[_State.CONTENT] = False, True
        else:
            self._write(raw)

    def _take(self) -> list[Delta]:
        deltas, self._deltas = self._deltas + self._writer.take(), []
        return deltas


def _read_header(text: str, has_role: bool) -> _Header:
    """Reads what stands between <|start|> and <|message|>; `has_role`: it begins with a role."""
    channel, recipient = _CHANNEL.search(text), _TO.search(text)
    rest = _CONTENT_TYPE.sub(" ", _TO.sub(" ", _CHANNEL.sub(" ", text)))
    if has_role:
        rest = _ROLE.sub("", rest, count=1)
    return _Header(channel[1] if channel else "", recipient[1] if recipient else "", rest.strip())
