"""Encodes large answers as JSON piece by piece: a single call would hold the interpreter lock and stop all streams."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic_core import to_json

MAX_PIECE_VALUES = 4096  # about a millisecond


def json_pieces(value: Any) -> Iterator[bytes]:
    """The JSON of `value` in pieces: objects by key, `choices` by element, other lists by slices."""
    if isinstance(value, dict):
        separator = b"{"
        for key, each in value.items():
            yield separator + to_json(key) + b":"
            if key == "choices":
                yield from _choices(each)
            else:
                yield from json_pieces(each)
            separator = b","
        yield b"}" if value else b"{}"
    elif isinstance(value, list) and value:
        size = max(1, MAX_PIECE_VALUES // _num_values(value[-1]))
        separator = b"["
        for start in range(0, len(value), size):
            yield separator + to_json(value[start : start + size])[1:-1]
            separator = b","
        yield b"]"
    else:
        yield to_json(value)


def _choices(choices: Sequence[Any]) -> Iterator[bytes]:
    separator = b"["
    for choice in choices:
        yield separator
        yield from json_pieces(choice)
        separator = b","
    yield b"]" if choices else b"[]"


def _num_values(element: Any) -> int:
    """Rough number of JSON values in one element. The elements of a list are similar, so one is enough."""
    if isinstance(element, Mapping):
        return 1 + sum(1 + (len(each) if isinstance(each, list | dict) else 0) for each in element.values())
    return 1 + (len(element) if isinstance(element, list) else 0)
