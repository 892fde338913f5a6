"""Follows a JSON text character by character, so that its end and the first error are known at once."""

from __future__ import annotations

import re
from enum import Enum, auto

MAX_DEPTH = 64
WHITESPACE = " \t\n\r"
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_LITERALS = ("true", "false", "null")
_ESCAPES = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}


class MalformedJson(ValueError):
    """The text is not the beginning of any JSON text."""


class State(Enum):
    """What may follow."""

    VALUE = auto()
    FIRST_VALUE = auto()  # a value or ]
    FIRST_KEY = auto()  # a key or }
    KEY = auto()
    COLON = auto()
    NEXT = auto()  # a comma, or the end of the object or list
    STRING = auto()  # the rest of a string
    KEY_STRING = auto()
    NUMBER = auto()
    LITERAL = auto()
    END = auto()  # nothing: the value is complete


class JsonScanner:
    """One JSON value, usually an object. A number at the outermost level has no end."""

    def __init__(self) -> None:
        self.state = State.VALUE
        self._closers: list[str] = []  # of the open objects and lists
        self._word = ""  # the number, literal or escape so far

    @property
    def depth(self) -> int:
        """The number of open objects and lists."""
        return len(self._closers)

    def feed(self, character: str) -> str:
        """Takes the next character and returns it as JSON has it: a control character in a string becomes an escape.

        Models often write a line break into a string; JSON does not allow it. Raises `MalformedJson`.
        """
        state = self.state
        if state is State.STRING or state is State.KEY_STRING:
            return self._feed_string(character)
        if state is State.NUMBER:
            if character in "+-.eE0123456789":
                self._word += character
                return character
            if not _NUMBER.fullmatch(self._word):
                raise MalformedJson(f"{self._word[:40]!r} is not a number")
            self._end_value()
            return self.feed(character)
        if state is State.LITERAL:
            self._feed_literal(character)
        elif character not in WHITESPACE:
            self._feed_structure(state, character)
        return character

    def _feed_structure(self, state: State, character: str) -> None:
        if state is State.NEXT and character == ",":
            self.state = State.KEY if self._closers[-1] == "}" else State.VALUE
        elif state in (State.NEXT, State.FIRST_KEY, State.FIRST_VALUE) and character == self._closers[-1]:
            self._closers.pop()
            self._end_value()
        elif state in (State.FIRST_KEY, State.KEY) and character == '"':
            self.state, self._word = State.KEY_STRING, ""
        elif state is State.COLON and character == ":":
            self.state = State.VALUE
        elif state in (State.VALUE, State.FIRST_VALUE):
            self._begin_value(character)
        else:
            raise MalformedJson(f"{character!r} where {state.name} is expected")

    def _begin_value(self, character: str) -> None:
        if character in "{[":
            if len(self._closers) == MAX_DEPTH:
                raise MalformedJson(f"nested more than {MAX_DEPTH} deep")
            self._closers.append("}" if character == "{" else "]")
            self.state = State.FIRST_KEY if character == "{" else State.FIRST_VALUE
        elif character == '"':
            self.state, self._word = State.STRING, ""
        elif character in "-0123456789":
            self.state, self._word = State.NUMBER, character
        elif character in "tfn":
            self.state, self._word = State.LITERAL, character
        else:
            raise MalformedJson(f"{character!r} begins no value")

    def _feed_string(self, character: str) -> str:
        if self._word:  # in an escape
            self._word += character
            if len(self._word) > 2:
                if character not in "0123456789abcdefABCDEF":
                    raise MalformedJson(f"{self._word!r} is not an escape")
                if len(self._word) == 6:
                    self._word = ""
            elif character != "u":
                if character not in '"\\/bfnrt':
                    raise MalformedJson(f"{self._word!r} is not an escape")
                self._word = ""
        elif character == "\\":
            self._word = character
        elif character == '"':
            if self.state is State.KEY_STRING:
                self.state = State.COLON
            else:
                self._end_value()
        elif character < " ":
            return _ESCAPES.get(character) or f"\\u{ord(character):04x}"
        return character

    def _feed_literal(self, character: str) -> None:
        self._word += character
        if self._word in _LITERALS:
            self._end_value()
        elif not any(literal.startswith(self._word) for literal in _LITERALS):
            raise MalformedJson(f"{self._word!r} is not a value")

    def _end_value(self) -> None:
        self.state, self._word = State.NEXT if self._closers else State.END, ""
