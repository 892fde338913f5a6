"""Finds markers such as `<tool_call>` in a text that arrives in pieces."""

from __future__ import annotations

from collections.abc import Sequence


def find_marker(text: str, markers: Sequence[str]) -> tuple[int, str | None]:
    """Index and name of the first marker in `text`, the longest one if several begin there.

    Without a marker: the index from which the text may be the beginning of one, and None.
    """
    found = [(index, -len(marker), marker) for marker in markers if (index := text.find(marker)) >= 0]
    if found:
        index, _, marker = min(found)
        return index, marker
    longest = max(map(len, markers)) - 1
    for index in range(max(0, len(text) - longest), len(text)):
        if any(marker.startswith(text[index:]) for marker in markers):
            return index, None
    return len(text), None
