"""The word that somebody may have meant who wrote one that there is not."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(given: str, words: Iterable[str]) -> str | None:
    """The word with the same letters in another order, else the most similar one; None if none is similar."""
    words = list(words)
    swapped = [word for word in words if sorted(word) == sorted(given)]  # prot is port, though prompt is closer
    return next(iter(swapped or difflib.get_close_matches(given, words, 1)), None)
