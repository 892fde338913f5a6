"""Encodes large answers as JSON piece by piece, so that other work can be done in between.

A list may be given as an iterator, whose elements are made when they are encoded: so the objects of a large answer,
which take ten times the memory of what they tell, never exist all at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from pydantic_core import to_json

from services.gateway.apis.shared.hidden_states import HiddenStates

MAX_PIECE_VALUES = 1024  # less than a millisecond, with what makes them
UNLIKE = ("choices", "output")  # lists with large elements


class LazyList:
    """A list that several objects may have: its elements are made each time that it is encoded."""

    __slots__ = ("_make",)

    def __init__(self, make: Callable[[], Iterable[Any]]) -> None:
        self._make = make

    def __iter__(self) -> Iterator[Any]:
        return iter(self._make())


def json_at_once(value: Any) -> bytes:
    """The JSON of a value that is not large."""
    return to_json(value, fallback=iter)  # of a `LazyList`


def json_pieces(value: Any) -> Iterator[bytes]:
    """The JSON of `value` in pieces: objects by key, lists by element, plain values in a list some at a time."""
    if isinstance(value, HiddenStates):
        yield from value.json_pieces()
    elif isinstance(value, dict):
        separator = b"{"
        for key, each in value.items():
            yield separator + to_json(key) + b":"
            if key in UNLIKE and isinstance(each, list | Iterator):
                yield from _list_pieces(iter(each), has_large=True)
            else:
                yield from json_pieces(each)
            separator = b","
        yield b"}" if value else b"{}"
    elif isinstance(value, list | Iterator | LazyList):
        yield from _list_pieces(iter(value))
    else:
        yield to_json(value)


def _list_pieces(elements: Iterator[Any], *, has_large: bool = False) -> Iterator[bytes]:
    """`has_large`: all elements that are objects are large."""
    separator, plain = b"[", []
    for element in elements:
        if not isinstance(element, dict | list | Iterator):
            plain.append(element)
            if len(plain) < MAX_PIECE_VALUES:
                continue
        if plain:
            yield separator + to_json(plain)[1:-1]
            separator, plain = b",", []
            if not isinstance(element, dict | list | Iterator):
                continue
        if has_large or _is_large(element):
            yield separator
            yield from json_pieces(element)
        else:
            yield separator + to_json(element)
        separator = b","
    if plain:
        yield separator + to_json(plain)[1:-1]
        separator = b","
    yield b"[]" if separator == b"[" else b"]"


def _is_large(element: Any) -> bool:
    """Whether it is made while it is encoded, or has many values in its lists and objects."""
    if isinstance(element, Iterator):
        return True
    made_later = Iterator | LazyList | HiddenStates
    count = 0
    for each in element.values() if isinstance(element, dict) else element:
        if isinstance(each, made_later):
            return True
        if isinstance(each, dict) and any(isinstance(inner, made_later) for inner in each.values()):
            return True
        count += len(each) if isinstance(each, dict | list | tuple) else 1
    return count > MAX_PIECE_VALUES
