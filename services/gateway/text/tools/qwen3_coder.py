"""Qwen 3 Coder: <tool_call><function=f><parameter=a>value</parameter></function></tool_call>.

A value stands between line breaks, without quotation marks: the tool's schema says whether it is a string. <tool_call>
and </parameter> may be missing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from enum import Enum, auto
from typing import Any

from services.gateway.text.deltas import Delta
from services.gateway.text.markers import find_marker
from services.gateway.text.tools.json_call import MalformedCall
from services.gateway.text.tools.marked_parser import MarkedParser
from services.gateway.text.tools.parameter_types import is_written_as_text, json_types, type_of
from services.gateway.text.tools.python_literal import literal_to_json
from services.gateway.text.tools.tool import NAME
from services.gateway.text.tools.unfinished_value import unfinished_to_json

BEGIN, END = "<tool_call>", "</tool_call>"
FUNCTION, END_FUNCTION = "<function=", "</function>"
PARAMETER, END_PARAMETER = "<parameter=", "</parameter>"
_END_OF_VALUE = "\n" + END_PARAMETER
_END_OF_CALL = "\n" + END_FUNCTION
_AFTER_VALUE = ("\n" + PARAMETER, _END_OF_CALL)  # some models leave out the end of a value before these
# Or the beginning of one at the answer's end; an END_FUNCTION before anything else is a part of a value.
_AFTER_FUNCTION = (END, BEGIN, FUNCTION)
MAX_KEY_CHARACTERS = 256


class _State(Enum):
    CONTENT = auto()
    BLOCK = auto()  # after <tool_call>, or between two functions
    NAME = auto()
    FUNCTION = auto()  # between parameters
    KEY = auto()
    VALUE_START = auto()  # one line break is dropped
    VALUE = auto()


class Qwen3CoderParser(MarkedParser):
    """Calls as tags. The values of strings are streamed, other values are one piece each."""

    end_marker = END

    def __init__(self, new_id: Callable[[], str], schemas: Mapping[str, Mapping[str, Any] | None]) -> None:
        """`schemas`: the JSON Schemas of the tools' arguments, by name."""
        super().__init__(new_id)
        self._schemas = schemas
        self._state = _State.CONTENT
        self._properties: Mapping[str, Any] = {}
        self._num_arguments = 0
        self._is_string = False
        self._types: frozenset[str] | None = None  # of a parameter that is no string; None: any
        self._value: list[str] = []  # of a parameter that is no string
        self._is_over = False  # whether the answer has ended

    def finish(self, is_cut: bool = False) -> list[Delta]:
        self._is_over = True
        return super().finish(is_cut)

    def _step(self) -> bool:
        match self._state:
            case _State.CONTENT:
                return self._find_call()
            case _State.BLOCK:
                return self._read_block()
            case _State.NAME:
                return self._read_name()
            case _State.FUNCTION:
                return self._read_function()
            case _State.KEY:
                return self._read_key()
            case _State.VALUE_START:
                if self._text:
                    self._take(self._text.startswith("\n"))
                    self._state = _State.VALUE
                    return True
                return False
            case _State.VALUE:
                return self._read_value()

    def _find_call(self) -> bool:
        index, marker = find_marker(self._text, (BEGIN, FUNCTION))
        self._writer.content(self._text[:index])
        self._text = self._text[index:]
        if marker is None:
            return False
        self._take(len(marker))
        self._state = _State.BLOCK if marker == BEGIN else _State.NAME
        return True

    def _read_block(self) -> bool:
        if not self._skip_space():
            return False
        if self._text.startswith(FUNCTION):
            self._take(len(FUNCTION))
            self._state = _State.NAME
        elif not self._raw and self._text.startswith(END):
            self._skip(len(END))
            self._reset()
        elif FUNCTION.startswith(self._text) or (not self._raw and END.startswith(self._text)):
            return False
        elif self._raw:
            raise MalformedCall("no function follows")
        else:
            self._reset()
        return True

    def _read_name(self) -> bool:
        name = self._read_until_bracket()
        if name is None:
            return False
        if not NAME.fullmatch(name):
            raise MalformedCall("there is no name of a tool")
        properties = (self._schemas.get(name) or {}).get("properties")
        self._properties = properties if isinstance(properties, Mapping) else {}
        self._has_begun, self._num_arguments, self._state = True, 0, _State.FUNCTION
        self._writer.begin(name)
        return True

    def _read_function(self) -> bool:
        if not self._skip_space():
            return False
        if self._text.startswith(PARAMETER):
            self._take(len(PARAMETER))
            self._state = _State.KEY
        elif self._text.startswith(END_FUNCTION):
            self._take(len(END_FUNCTION))
            self._writer.arguments("}" if self._num_arguments else "{}")
            self._end_call()
            self._state = _State.BLOCK
        elif PARAMETER.startswith(self._text) or END_FUNCTION.startswith(self._text):
            return False
        else:
            raise MalformedCall("neither a parameter nor the end of the function follows")
        return True

    def _read_key(self) -> bool:
        key = self._read_until_bracket()
        if key is None:
            return False
        schema = self._properties.get(key)
        self._is_string, self._types, self._value = is_written_as_text(schema), json_types(schema), []
        self._writer.arguments(self._begin_argument(key) + '"' * self._is_string)
        self._num_arguments += 1
        self._state = _State.VALUE_START
        return True

    def _read_value(self) -> bool:
        index, marker = find_marker(self._text, (END_PARAMETER, _END_OF_VALUE, *_AFTER_VALUE))
        self._add_to_value(self._take(index))
        if marker is None:
            return False
        if marker == _END_OF_CALL:
            rest = self._text[len(marker) :].lstrip()
            if any(each.startswith(rest) and each != rest for each in _AFTER_FUNCTION):
                if not self._is_over:
                    return False
            elif not rest.startswith(_AFTER_FUNCTION):
                self._add_to_value(self._take(len(marker)))
                return True
        self._take(1 if marker in _AFTER_VALUE else len(marker))
        self._writer.arguments('"' if self._is_string else _to_json("".join(self._value), self._types))
        self._state = _State.FUNCTION
        return True

    def _add_to_value(self, piece: str) -> None:
        if self._is_string:
            self._writer.arguments(json.dumps(piece, ensure_ascii=False)[1:-1])
        else:
            self._value.append(piece)

    def _read_until_bracket(self) -> str | None:
        """The text before the next >, which it takes; None if that has not come yet."""
        index = self._text.find(">")
        text = self._text if index < 0 else self._text[:index]
        if len(text) > MAX_KEY_CHARACTERS or "\n" in text:
            raise MalformedCall("a tag has no end")
        if index < 0:
            return None
        self._take(index + 1)
        return text.strip()

    def _write_rest(self) -> bool:
        if self._state is _State.KEY and (key := self._text.strip()):
            self._writer.arguments(self._begin_argument(key).removesuffix('": '))
        elif self._state is _State.VALUE and not self._is_string:
            self._writer.arguments(unfinished_to_json("".join(self._value)))
        return self._has_begun

    def _begin_argument(self, key: str) -> str:
        return f"{', ' if self._num_arguments else '{'}{json.dumps(key, ensure_ascii=False)}: "

    def _reset(self) -> None:
        self._state = _State.CONTENT


def _to_json(text: str, types: frozenset[str] | None) -> str:
    """A value that need not be a string: JSON, else a literal of Python, else a string after all.

    `types`: those that the schema allows. A value of another type is a string, if that is allowed.
    """
    text = text.strip()
    try:
        value = json.loads(text)
        encoded = json.dumps(value, ensure_ascii=False, allow_nan=False)
        encoded.encode()  # no halves of characters
    except (ValueError, RecursionError):
        try:
            encoded = literal_to_json(text)
            value = json.loads(encoded)
        except ValueError:
            value, encoded = text, json.dumps(text, ensure_ascii=False)
    if types is not None and "string" in types and type_of(value) not in types:
        return json.dumps(text, ensure_ascii=False)
    return encoded
