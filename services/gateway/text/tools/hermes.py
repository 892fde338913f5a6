"""Hermes 2 Pro, Qwen 2.5, Qwen 3 and others: <tool_call>{"name": "f", "arguments": {...}}</tool_call>."""

from __future__ import annotations

from enum import Enum, auto

from services.gateway.text.markers import find_marker
from services.gateway.text.tools.json_call import JsonCall
from services.gateway.text.tools.marked_parser import MarkedParser

BEGIN, END = "<tool_call>", "</tool_call>"


class _State(Enum):
    CONTENT = auto()
    CALL = auto()
    AFTER_CALL = auto()  # expecting the end marker; some models write several calls before it


class HermesParser(MarkedParser):
    """Calls between markers. The end marker may be missing at the end of the answer."""

    end_marker = END
    _state = _State.CONTENT

    def _step(self) -> bool:
        if self._state is _State.CONTENT:
            return self._find_call()
        if self._state is _State.CALL:
            return self._read_call()
        text = self._text.lstrip()
        if text.startswith(END):
            self._text = text.removeprefix(END)
            self._reset()
            return True
        if END.startswith(text):  # also if there is none
            return False
        if text.startswith("{"):
            self._text, self._state = text, _State.CALL
        else:
            self._reset()
        return True

    def _find_call(self) -> bool:
        index, marker = find_marker(self._text, (BEGIN,))
        self._writer.content(self._text[:index])
        self._text = self._text[index:]
        if marker is None:
            return False
        self._take(len(BEGIN))
        self._state = _State.CALL
        return True

    def _read_call(self) -> bool:
        if self._call is None:
            if not self._skip_space():
                return False
            self._call = JsonCall(self._writer)
        if not self._feed_call():
            return False
        self._state = _State.AFTER_CALL
        return True

    def _reset(self) -> None:
        self._state = _State.CONTENT
