"""Finds stop strings in a stream of text, also across chunks. Holds back text that may become a stop string.

The gateway's event loop uses one `StopStrings` per output. It takes constant time per character and stop string (Knuth,
Morris and Pratt, "Fast pattern matching in strings", SIAM Journal on Computing 1977), and four bytes for each character
of a stop string, which all outputs of a request share.
"""

from __future__ import annotations

import functools
from array import array
from collections.abc import Sequence

from services.common.errors import InvalidRequest

NUM_CACHED = 16  # lists of stop strings, kept for further answers with the same ones


class StopStrings:
    """Ends a text at its first complete stop string.

    The text stops at the first character that completes any stop string, so the result does not depend on how the text
    is divided into tokens or messages. If several stop strings end at that character, the longest one counts: the text
    before it has no part of the others.
    """

    def __init__(self, stop: Sequence[str], include_in_output: bool = False) -> None:
        """Raises `InvalidRequest` for an empty stop string."""
        self._stop = stop
        self._borders = _borders(tuple(stop))
        self._first_characters = {string[0] for string in stop}
        self._num_matched = [0] * len(stop)  # of each stop string: how much of it the text so far ends with
        self._held = ""
        self._matched: str | None = None
        self._include_in_output = include_in_output

    def feed(self, text: str) -> tuple[str, str | None]:
        """Takes the next piece of text. Returns the text that can be shown now, and the stop string found or None.

        After a stop string was found, it drops further text and returns the same stop string.
        """
        if self._matched is not None:
            return "", self._matched
        if not self._held and self._first_characters.isdisjoint(text):
            return text, None  # the common case, which is fast
        for index, character in enumerate(text):
            if (stop := self._advance(character)) is not None:
                return self._finish(self._held + text[: index + 1], stop), stop
        whole = self._held + text
        num_shown = len(whole) - max(self._num_matched)
        self._held = whole[num_shown:]
        return whole[:num_shown], None

    def flush(self) -> str:
        """The text that was held back. Call it after the last piece."""
        held, self._held, self._num_matched = self._held, "", [0] * len(self._stop)
        return held

    def _advance(self, character: str) -> str | None:
        """The longest stop string that this character completes."""
        found: str | None = None
        for i, (stop, borders, count) in enumerate(zip(self._stop, self._borders, self._num_matched, strict=True)):
            if not count and stop[0] != character:
                continue  # most of them
            while count and stop[count] != character:
                count = borders[count - 1]
            count += stop[count] == character
            self._num_matched[i] = count
            if count == len(stop) > len(found or ""):
                found = stop
        return found

    def _finish(self, text: str, stop: str) -> str:
        self._matched, self._held = stop, ""
        return text if self._include_in_output else text[: len(text) - len(stop)]


@functools.lru_cache(NUM_CACHED)
def _borders(stop: tuple[str, ...]) -> list[array[int]]:
    """For each prefix of each stop string, the length of the longest shorter prefix that it ends with."""
    found = []
    for string in stop:
        if not string:
            raise InvalidRequest("a stop string is empty, must have at least 1 character")
        borders, count = array("I", [0]), 0
        for character in string[1:]:
            while count and string[count] != character:
                count = borders[count - 1]
            count += string[count] == character
            borders.append(count)
        found.append(borders)
    return found
