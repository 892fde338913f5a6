"""Encodes answers as JSON: in a line that is one to every reader, or piece by piece with other work in between.

A list may be given as an iterator, whose elements are made when they are encoded: so the objects of a large answer,
which take ten times the memory of what they tell, never exist all at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

from pydantic_core import to_json

from services.gateway.features.report import JsonPieces

MAX_PIECE_VALUES = 1024  # less than a millisecond, with what makes them
MAX_MEMBERS = 256  # of a lazy object, each of which may have some values
UNLIKE = ("choices", "output")  # lists with large elements
MAX_PIECE_CHARACTERS = 2**16  # of a long text; less than a millisecond, too
PLAIN = (str, float, int, bool, type(None))
# U+0085, U+2028 and U+2029 end a line for `str.splitlines`, and for clients that read an answer with it (httpx's
# `iter_lines`), but neither in JSON (RFC 8259) nor in event streams (HTML standard).
_ENDS_OF_LINES = ((b"\xc2\x85", rb"\u0085"), (b"\xe2\x80\xa8", rb"\u2028"), (b"\xe2\x80\xa9", rb"\u2029"))


def json_line(value: Any) -> bytes:
    """The JSON of a value that is not large, with what ends a line for some readers escaped."""
    encoded = to_json(value, fallback=_plain)
    if not encoded.isascii():
        for end, escaped in _ENDS_OF_LINES:
            encoded = encoded.replace(end, escaped)
    return encoded


class LazyList(JsonPieces):
    """A list that several objects may have: its elements are made each time that it is encoded."""

    def __init__(self, make: Callable[[], Iterable[Any]]) -> None:
        self._make = make

    def __iter__(self) -> Iterator[Any]:
        return iter(self._make())

    def json_pieces(self) -> Iterator[bytes]:
        return _list_pieces(iter(self))


class LazyObject(JsonPieces):
    """An object of very many members, which are made when they are encoded, once."""

    def __init__(self, members: Iterator[tuple[str, Any]]) -> None:
        self.members = members

    def json_pieces(self) -> Iterator[bytes]:
        separator = b"{"
        while some := dict(islice(self.members, MAX_MEMBERS)):
            yield separator + json_line(some)[1:-1]
            separator = b","
        yield b"{}" if separator == b"{" else b"}"


class WrittenJson(JsonPieces):
    """A value that several objects have, and whose JSON is made once."""

    def __init__(self, value: Any) -> None:
        self._json = json_line(value)

    def json_pieces(self) -> Iterator[bytes]:
        yield self._json


def _plain(value: JsonPieces) -> Any:
    return dict(value.members) if isinstance(value, LazyObject) else iter(value)


def json_pieces(value: Any) -> Iterator[bytes]:
    """The JSON of `value` in pieces: large values in objects and lists one by one, small ones some at a time."""
    if isinstance(value, JsonPieces):
        yield from value.json_pieces()
    elif isinstance(value, dict):
        yield from _object_pieces(value)
    elif isinstance(value, list | Iterator):
        yield from _list_pieces(iter(value))
    else:
        yield json_line(value)


def text_pieces(text: str) -> Iterator[bytes]:
    """The JSON of a long text."""
    yield b'"'
    for start in range(0, len(text), MAX_PIECE_CHARACTERS):
        yield json_line(text[start : start + MAX_PIECE_CHARACTERS])[1:-1]
    yield b'"'


def list_pieces(elements: Iterable[Iterable[bytes]]) -> Iterator[bytes]:
    """A JSON list of values that come in pieces themselves."""
    yield b"["
    for index, pieces in enumerate(elements):
        if index:
            yield b","
        yield from pieces
    yield b"]"


def _object_pieces(value: dict[str, Any]) -> Iterator[bytes]:
    separator, small, num_small = b"{", {}, 0
    for key, each in value.items():
        has_large = key in UNLIKE and isinstance(each, list | Iterator)
        num_values = MAX_PIECE_VALUES + 1 if has_large else _num_values(each)
        if num_values <= MAX_PIECE_VALUES:
            small[key] = each
            num_small += num_values
            if num_small < MAX_PIECE_VALUES:
                continue
        if small:
            yield separator + json_line(small)[1:-1]
            separator, small, num_small = b",", {}, 0
        if num_values > MAX_PIECE_VALUES:
            yield separator + json_line(key) + b":"
            yield from _list_pieces(iter(each), has_large=True) if has_large else json_pieces(each)
            separator = b","
    if small:
        yield separator + json_line(small)[1:-1]
    yield b"}" if value else b"{}"


def _list_pieces(elements: Iterator[Any], *, has_large: bool = False) -> Iterator[bytes]:
    """`has_large`: all elements that are objects are large."""
    separator, plain = b"[", []
    for element in elements:
        if not isinstance(element, dict | list | Iterator | LazyObject):
            plain.append(element)
            if len(plain) < MAX_PIECE_VALUES:
                continue
        if plain:
            yield separator + json_line(plain)[1:-1]
            separator, plain = b",", []
            if not isinstance(element, dict | list | Iterator | LazyObject):
                continue
        if has_large or _num_values(element) > MAX_PIECE_VALUES:
            yield separator
            yield from json_pieces(element)
        else:
            yield separator + json_line(element)
        separator = b","
    if plain:
        yield separator + json_line(plain)[1:-1]
        separator = b","
    yield b"[]" if separator == b"[" else b"]"


def _num_values(value: Any) -> int:
    """How many values it has; more than `MAX_PIECE_VALUES` if they are that many, or made while it is encoded."""
    if type(value) is dict:
        inner = value.values()
    elif type(value) is list or type(value) is tuple:
        inner = value
    else:
        return MAX_PIECE_VALUES + 1 if isinstance(value, Iterator | JsonPieces) else 1
    count = 1
    for each in inner:
        count += 1 if type(each) in PLAIN else _num_values(each)
        if count > MAX_PIECE_VALUES:
            break
    return count
