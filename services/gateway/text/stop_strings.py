"""Stop strings in a stream: finds them across any chunk borders and holds back what could still become one.

One `StopStrings` per output, used by the gateway's event loop; those of a request share its automaton, which is that
of Aho and Corasick, "Efficient string matching: an aid to bibliographic search", CACM 1975: constant time a character.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from services.common.errors import InvalidRequest

MAX_AUTOMATA = 16  # that are kept for further answers with the same stop strings


@dataclass(slots=True, eq=False)
class _Node:
    """A prefix of a stop string; the current node is the longest one with which the text so far ends."""

    depth: int  # length of the prefix in characters
    children: dict[str, _Node] = field(default_factory=dict)
    fallback: _Node | None = None  # longest proper suffix that is a prefix too; None: the root
    stop: str | None = None  # longest stop string with which the prefix ends


class StopStrings:
    """Ends a text where its first stop string is complete.

    The text stops at the first character that completes any stop string, as if characters came one by one, so
    the result does not depend on how tokens or messages cut the text. Of several that end at that character
    the longest counts, in whatever order they were listed: the text before it holds no part of the others.
    """

    def __init__(self, stop: Sequence[str], include_in_output: bool = False) -> None:
        """Raises `InvalidRequest` for an empty stop string."""
        self._root = _build_automaton(tuple(stop))
        self._node = self._root
        self._held = ""
        self._matched: str | None = None
        self._include_in_output = include_in_output

    def feed(self, text: str) -> tuple[str, str | None]:
        """Take the next piece of text; return what can be shown now and the stop string found, if any.

        After a stop string was found, further text is dropped and the same stop string returned.
        """
        if self._matched is not None:
            return "", self._matched
        node = self._node
        if node is self._root and node.children.keys().isdisjoint(text):
            return text, None  # the common case, at the speed of C
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
        """The held-back rest, once no more text comes."""
        held, self._held, self._node = self._held, "", self._root
        return held

    def _finish(self, text: str, stop: str) -> str:
        self._matched, self._held = stop, ""
        return text if self._include_in_output else text[: len(text) - len(stop)]


@functools.lru_cache(MAX_AUTOMATA)
def _build_automaton(stop: tuple[str, ...]) -> _Node:
    """One for all answers of a request: it never changes, and takes milliseconds and a megabyte at the most."""
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
