"""Garbage that only a collection of Python's finds."""

from __future__ import annotations

import weakref


class Node:
    """May refer to itself."""

    itself: Node | None = None


def make_cycle() -> weakref.ref[Node]:
    """To an object that nothing else refers to any more."""
    node = Node()
    node.itself = node
    return weakref.ref(node)
