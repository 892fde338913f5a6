"""Llama 3.2 and 4, ToolACE: a list of calls as in Python, [f(a="x", b=3), g()], maybe after <|python_start|>.

The list must begin a line and the first name must be a tool's: there is no marker.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Container
from enum import Enum, auto

from services.gateway.text.markers import find_marker
from services.gateway.text.tools.json_call import MalformedCall
from services.gateway.text.tools.marked_parser import MarkedParser
from services.gateway.text.tools.python_literal import MAX_CHARACTERS, literal_to_json
from services.gateway.text.tools.unfinished_value import unfinished_to_json

START, END = "<|python_start|>", "<|python_end|>"
MAX_DEPTH = 32
_LIST = "["
_HEAD = re.compile(r"\s*([a-zA-Z0-9_-]{0,64})\s*")
_KEY = re.compile(r"\s*([^\W\d]\w{0,63}|)\s*")
PARAMETER_NAME = re.compile(r"[^\W\d]\w{0,63}")
_CLOSERS = {"(": ")", "[": "]", "{": "}"}


class _State(Enum):
    CONTENT = auto()
    NAME = auto()
    KEY = auto()  # of a parameter, or the end of the call
    VALUE = auto()
    AFTER_CALL = auto()


class PythonicParser(MarkedParser):
    """Calls of known tools as Python. Each argument is one piece of a stream."""

    end_marker = END

    def __init__(self, new_id: Callable[[], str], names: Container[str]) -> None:
        super().__init__(new_id)
        self._names = names
        self._state = _State.CONTENT
        self._num_arguments = 0
        self._key = ""
        self._value: list[str] = []  # the characters of the value so far
        self._closers: list[str] = []  # of its open brackets
        self._quote = ""  # of its open string
        self._is_escaped = False

    def _step(self) -> bool:
        if self._state is _State.CONTENT:
            return self._find_list()
        if self._state is _State.NAME:
            return self._read_name()
        if self._state is _State.KEY:
            return self._read_key()
        if self._state is _State.VALUE:
            return self._read_value()
        if not self._skip_space():
            return False
        if self._text[0] == ",":
            self._skip(1)
            self._state = _State.NAME
        elif self._text[0] == "]":
            self._skip(1)
            self._reset()
        else:
            self._reset()
        return True

    def _find_list(self) -> bool:
        index, marker = find_marker(self._text, (START, END, _LIST))
        self._show(index)
        if marker in (START, END):
            self._text = self._text[len(marker) :]
            self._is_line_blank = self._is_line_blank or marker == START
        elif marker == _LIST and self._is_line_blank:
            self._take(len(_LIST))
            self._state = _State.NAME
        elif marker == _LIST:
            self._show(len(_LIST))
        return marker is not None

    def _read_name(self) -> bool:
        match = _HEAD.match(self._text)
        assert match is not None
        if match.end() == len(self._text):
            return False
        if self._text[match.end()] != "(" or match[1] not in self._names:
            raise MalformedCall("there is no name of a tool")
        self._take(match.end() + 1)
        self._has_begun, self._num_arguments, self._state = True, 0, _State.KEY
        self._writer.begin(match[1])
        return True

    def _read_key(self) -> bool:
        match = _KEY.match(self._text)
        assert match is not None
        if match.end() == len(self._text):
            return False
        character = self._text[match.end()]
        if character == ")" and not match[1]:
            self._take(match.end() + 1)
            self._end_arguments()
        elif character == "=" and match[1]:
            self._take(match.end() + 1)
            self._key, self._value, self._state = match[1], [], _State.VALUE
        else:
            raise MalformedCall("there is no name of a parameter")
        return True

    def _read_value(self) -> bool:
        for index, character in enumerate(self._text):
            if not (self._quote or self._closers) and character in ",)":
                self._take(index)
                self._end_value()
                self._take(1)
                if character == ")":
                    self._end_arguments()
                else:
                    self._state = _State.KEY
                return True
            if not self._is_within_value(character):
                self._take(index)
                raise MalformedCall("the value is not a literal")
        self._take(len(self._text))
        return False

    def _is_within_value(self, character: str) -> bool:
        """Takes the next character of the value. Returns whether it may be part of one."""
        if self._quote:
            if self._is_escaped:
                self._is_escaped = False
            elif character == "\\":
                self._is_escaped = True
            elif character == self._quote:
                self._quote = ""
            elif character in "\n\r":  # models break lines within strings, Python does not
                character = "\\n" if character == "\n" else "\\r"
        elif character in "'\"":
            self._quote = character
        elif character in _CLOSERS:
            self._closers.append(_CLOSERS[character])
        elif character in ")]}" and (not self._closers or self._closers.pop() != character):
            return False
        self._value.append(character)
        return len(self._closers) <= MAX_DEPTH and len(self._value) <= MAX_CHARACTERS

    def _end_value(self) -> None:
        try:
            value = literal_to_json("".join(self._value))
        except ValueError as error:
            raise MalformedCall(str(error)) from error
        self._writer.arguments(self._begin_argument(self._key) + value)
        self._num_arguments += 1

    def _end_arguments(self) -> None:
        self._writer.arguments("}" if self._num_arguments else "{}")
        self._end_call()
        self._state = _State.AFTER_CALL

    def _write_rest(self) -> bool:
        if self._state is _State.KEY:
            match = _KEY.match(self._text)
            assert match is not None
            if match[1]:
                self._writer.arguments(self._begin_argument(match[1]).removesuffix('": '))
        elif self._state is _State.VALUE:
            self._writer.arguments(self._begin_argument(self._key) + unfinished_to_json("".join(self._value)))
        return self._has_begun

    def _begin_argument(self, key: str) -> str:
        return f"{', ' if self._num_arguments else '{'}{json.dumps(key)}: "

    def _reset(self) -> None:
        self._state, self._is_line_blank = _State.CONTENT, False
        self._closers, self._quote, self._is_escaped = [], "", False
