"""Encodes large answers as JSON piece by piece: a single call would hold the interpreter lock and stop all streams."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic_core import to_json

from services.gateway.http.answers.hidden_states import HiddenStates

MAX_PIECE_VALUES = 4096  # about a millisecond


def json_pieces(value: Any) -> Iterator[bytes]:
    """The JSON of `value` in pieces: objects by key, lists with large elements by element, other lists by slices."""
    if isinstance(value, HiddenStates):
        yield from value.json_pieces()
    elif isinstance(value, dict):
        separator = b"{"
        for key, each in value.items():
            yield separator + to_json(key) + b":"
            if key in ("choices", "output") and isinstance(each, list):
                yield from _elements(each)
            else:
                yield from json_pieces(each)
            separator = b","
        yield b"}" if value else b"{}"
    elif isinstance(value, list) and value:
        size = MAX_PIECE_VALUES // _num_values(value[-1])  # the elements of a list are similar, so one is enough
        if size == 0:
            yield from _elements(value)
            return
        separator = b"["
        for start in range(0, len(value), size):
            yield separator + to_json(value[start : start + size])[1:-1]
            separator = b","
        yield b"]"
    else:
        yield to_json(value)


def _elements(elements: Sequence[Any]) -> Iterator[bytes]:
    separator = b"["
    for element in elements:
        yield separator
        yield from json_pieces(element)
        separator = b","
    yield b"]" if elements else b"[]"


def _num_values(element: Any, most: int = MAX_PIECE_VALUES + 1) -> int:
    """Number of JSON values in one element, counted up to `most`."""
    if isinstance(element, HiddenStates):
        return most
    if not isinstance(element, Mapping | list):
        return 1
    count = 1
    for each in element.values() if isinstance(element, Mapping) else element:
        if count >= most:
            break
        count += _num_values(each, most - count)
    return count
