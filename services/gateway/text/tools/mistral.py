"""Mistral: [TOOL_CALLS] [{"name": "f", "arguments": {...}}, ...], or newer, for each call, [TOOL_CALLS]f[ARGS]{...}.

Some templates leave out [ARGS], some put [CALL_ID] and an id before it.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum, auto

from services.gateway.text.markers import find_marker
from services.gateway.text.tools.json_call import JsonArguments, JsonCall, MalformedCall
from services.gateway.text.tools.marked_parser import MarkedParser
from services.gateway.text.tools.tool import NAME

BEGIN, ARGS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
MAX_HEAD_CHARACTERS = 64  # of a name, and of an id


class _State(Enum):
    CONTENT = auto()
    HEAD = auto()  # after the marker: a list, or a name
    CALL_ID = auto()
    LIST = auto()  # between the calls of a list
    ARGUMENTS = auto()
    CALL = auto()  # a call of a list


class MistralParser(MarkedParser):
    """Calls of both forms."""

    def __init__(self, new_id: Callable[[], str]) -> None:
        super().__init__(new_id)
        self._state = _State.CONTENT
        self._name = ""
        self._is_list = False

    def _step(self) -> bool:
        state = self._state
        if state is _State.CONTENT:
            return self._find_call()
        if state is _State.HEAD:
            return self._read_head()
        if state is _State.CALL_ID:
            return self._read_id()
        if state is _State.LIST:
            return self._read_list()
        if not self._feed_call():
            return False
        self._state = _State.LIST if self._is_list else _State.CONTENT
        return True

    def _find_call(self) -> bool:
        index, marker = find_marker(self._text, (BEGIN,))
        self._writer.content(self._text[:index])
        self._text = self._text[index:]
        if marker is not None:
            self._take(len(BEGIN))
            self._state = _State.HEAD
        return marker is not None

    def _read_head(self) -> bool:
        if not self._skip_space():
            return False
        if self._text[0] in "[{":
            self._is_list = self._text[0] == "["
            if self._is_list:
                self._take(1)
                self._state = _State.LIST
            else:
                self._state, self._call = _State.CALL, JsonCall(self._writer)
            return True
        index, marker = find_marker(self._text, (ARGS, CALL_ID, "{"))
        name = self._text[:index].rstrip()
        if not NAME.fullmatch(name) or index > MAX_HEAD_CHARACTERS:
            raise MalformedCall("there is no name of a tool")
        if marker is None:
            return False
        self._name, self._is_list = name, False
        self._take(index if marker == "{" else index + len(marker))
        self._begin_arguments()
        if marker == CALL_ID:
            self._state = _State.CALL_ID
        return True

    def _read_id(self) -> bool:
        """Skips an id: the server gives ids of its own."""
        index, marker = find_marker(self._text, (ARGS,))
        if index > MAX_HEAD_CHARACTERS:
            raise MalformedCall("the id is too long")
        if marker is None:
            return False
        self._take(index + len(ARGS))
        self._begin_arguments()
        return True

    def _begin_arguments(self) -> None:
        self._state, self._call = _State.ARGUMENTS, JsonArguments(self._writer, self._name)

    def _read_list(self) -> bool:
        if not self._skip_space():
            return False
        first = self._text[0]
        if first == "{":
            self._state, self._call = _State.CALL, JsonCall(self._writer)
        elif first == "]":
            self._skip(1)
            if self._raw:  # an empty list
                raise MalformedCall("there is no call")
            self._state = _State.CONTENT
        elif first == "," and not self._raw:
            self._skip(1)
        else:
            raise MalformedCall("a call is not an object")
        return True

    def _reset(self) -> None:
        self._state = _State.CONTENT
