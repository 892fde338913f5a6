"""Finds stop strings in a stream of text, also across chunks. Holds back text that may become a stop string.

The gateway's event loop uses one `StopStrings` per output. All outputs of a request share an automaton, which takes
constant time per character (Aho and Corasick, "Efficient string matching: an aid to bibliographic search", CACM 1975).
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from services.common.errors import InvalidRequest

MAX_AUTOMATA = 16  # kept for further answers with the same stop strings


@dataclass(slots=True, eq=False)
class _Node:
    """A prefix of a stop string. The current node is the longest prefix that the text so far ends with."""

    depth: int  # length of the prefix in characters
    children: dict[str, _Node] = field(default_factory=dict)
    fallback: _Node | None = None  # longest proper suffix that is a prefix too; None: the root
    stop: str | None = None  # longest stop string that the prefix ends with


class StopStrings:
    """Ends a text at its first complete stop string.

    The text stops at the first character that completes any stop string, so the result does not depend on how the text
    is divided into tokens or messages. If several stop strings end at that character, the longest one counts: the text
    before it has no part of the others.
    """

    def __init__(self, stop: Sequence[str], include_in_output: bool = False) -> None:
        """Raises `InvalidRequest` for an empty stop string."""
        self._root = _build_automaton(tuple(stop))
        self._node = self._root
        self._held = ""
        self._matched: str | None = None
        self._include_in_output = include_in_output

    def feed(self, text: str) -> tuple[str, str | None]:
        """Takes the next piece of text. Returns the text that can be shown now, and the stop string found or None.

        After a stop string was found, it drops further text and returns the same stop string.
        """
        if self._matched is not None:
            return "", self._matched
        node = self._node
        if node is self._root and node.children.keys().isdisjoint(text):
            return text, None  # the common case, which is fast
        for index, character in enumerate(text):
            while character not in node.children and node.fallback is not None:
                node = node.fallback
            node = node.children.get(character, self._root)
            if node.stop is not None:
                return self._finish(self._held + text[: index + 1], node.stop), node.stop
        self._node = node
        whole = self._held + text
        num_shown = len(whole) - node.depth
        self._held = whole[num_shown:]
        return whole[:num_shown], None

    def flush(self) -> str:
        """The text that was held back. Call it after the last piece."""
        held, self._held, self._node = self._held, "", self._root
        return held

    def _finish(self, text: str, stop: str) -> str:
        self._matched, self._held = stop, ""
        return text if self._include_in_output else text[: len(text) - len(stop)]


@functools.lru_cache(MAX_AUTOMATA)
def _build_automaton(stop: tuple[str, ...]) -> _Node:
    """The automaton that all answers of a request share. It takes at most milliseconds and a megabyte."""
    root = _Node(depth=0)
    for string in stop:
        if not string:
            raise InvalidRequest("a stop string is empty, must have at least 1 character")
        node = root
        for character in string:
            node = node.children.setdefault(character, _Node(depth=node.depth + 1))
        node.stop = string
    queue = deque([root])
    while queue:
        parent = queue.popleft()
        for character, node in parent.children.items():
            fallback = parent.fallback
            while fallback is not None and character not in fallback.children:
                fallback = fallback.fallback
            node.fallback = root if fallback is None else fallback.children[character]
            node.stop = node.stop or node.fallback.stop
            queue.append(node)
    return root
