"""`TextObjects`: the events of streamed objects that differ in nothing but their text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pydantic_core import to_json

PLACEHOLDER = "\N{OBJECT REPLACEMENT CHARACTER}"


class TextObjects:
    """Encodes an object once for each index, and for every further text only the text. For one answer."""

    __slots__ = ("_frames", "_make")

    def __init__(self, make: Callable[[int, str], Any]) -> None:
        """`make`: the object with an index and a text, which is its last value that may have the placeholder."""
        self._make = make
        self._frames: dict[int, tuple[bytes, bytes]] = {}  # what surrounds the text, by index

    def first_frame(self) -> tuple[bytes, bytes]:
        """What surrounds the JSON of the text in `event` of index 0."""
        return self._frame(0)

    def event(self, index: int, text: str) -> bytes:
        """The event, which has no name, of the object with this index and text."""
        frame = self._frame(index)
        return b"%b%b%b" % (frame[0], to_json(text), frame[1])

    def _frame(self, index: int) -> tuple[bytes, bytes]:
        if (frame := self._frames.get(index)) is not None:
            return frame
        before, _, after = to_json(self._make(index, PLACEHOLDER)).rpartition(to_json(PLACEHOLDER))
        frame = self._frames[index] = (b"data: " + before, after + b"\n\n")
        return frame
