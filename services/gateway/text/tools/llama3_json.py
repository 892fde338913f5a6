"""Llama 3.1 to 3.3: {"name": "f", "parameters": {...}}, maybe after <|python_tag|>; several calls separated by ;

There is no marker, so only an object at the beginning of a line that first names a tool is a call.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from enum import Enum, auto

from services.gateway.text.markers import find_marker
from services.gateway.text.tools.json_call import JsonCall, MalformedCall
from services.gateway.text.tools.marked_parser import MarkedParser

TAG = "<|python_tag|>"
_OBJECT = "{"


class _State(Enum):
    CONTENT = auto()
    AFTER_TAG = auto()
    CALL = auto()
    AFTER_CALL = auto()


class Llama3JsonParser(MarkedParser):
    """Calls of known tools as bare objects."""

    def __init__(self, new_id: Callable[[], str], names: Container[str]) -> None:
        super().__init__(new_id)
        self._names = names
        self._state = _State.CONTENT

    def _step(self) -> bool:
        if self._state is _State.CONTENT:
            return self._find_call()
        if self._state is _State.CALL:
            if not self._feed_call():
                return False
            self._state = _State.AFTER_CALL
            return True
        if not self._skip_space():
            return False
        if self._text.startswith(_OBJECT):
            self._begin_call()
        elif self._state is _State.AFTER_TAG:
            raise MalformedCall("no call follows the marker")
        elif self._text[0] in ";,":
            self._skip(1)
        else:
            self._reset()
        return True

    def _find_call(self) -> bool:
        index, marker = find_marker(self._text, (TAG, _OBJECT))
        self._show(index)
        if marker == TAG:
            self._take(len(TAG))
            self._state = _State.AFTER_TAG
        elif marker == _OBJECT and self._is_line_blank:
            self._begin_call()
        elif marker == _OBJECT:
            self._show(len(_OBJECT))
        return marker is not None

    def _begin_call(self) -> None:
        self._state, self._call = _State.CALL, JsonCall(self._writer, self._names)

    def _reset(self) -> None:
        self._state, self._is_line_blank = _State.CONTENT, False
