"""Times of words: `token_steps` says where tokens of an output are in its sound, `split_words` which ones are words.

Both as the code published with arXiv:2212.04356, and as transformers.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

LANGUAGES_WITHOUT_SPACES = ("zh", "ja", "th", "lo", "my", "yue")  # their characters count as words
_OPENING, _CLOSING = "\"'“¡¿([{-", "\"'.。,，!！?？:：”)]}、"
_REPLACEMENT = "\ufffd"  # what the bytes of half a character are decoded to
_DIAGONAL, _UP, _LEFT = range(3)


@dataclass(frozen=True, slots=True)
class Word:
    """A word, and its times in seconds from the beginning of the sound."""

    text: str
    start: float
    end: float


class WordTokens(NamedTuple):
    """A word, and the indexes of its first and its last token."""

    text: str
    first: int
    last: int


def token_steps(weights: np.ndarray) -> np.ndarray:
    """weights: float32 [num_tokens, num_steps] -> the first step of each token, int64 [num_tokens].

    These are the steps of the monotonic path through all tokens and steps with the largest sum of weights (dynamic time
    warping). From a place on the path to the next, the token or the step or both are one more.
    """
    num_tokens, num_steps = weights.shape
    moves = np.empty((num_tokens, num_steps), np.int8)  # by which the cheapest path comes to each place
    above = np.full(num_steps + 1, np.inf)  # costs of the paths to the token before, a column in front of the steps
    above[0] = 0.0
    for token, costs in enumerate(-weights.astype(np.float64)):
        # cost[j] = costs[j] + min(above[j - 1], above[j], cost[j - 1]), for all j at once.
        sums = np.cumsum(costs)
        entered = np.minimum(above[:-1], above[1:])
        here = np.full(num_steps + 1, np.inf)
        here[1:] = sums + np.minimum.accumulate(entered - (sums - costs))
        diagonal, up, left = above[:-1], above[1:], here[:-1]
        moves[token] = np.where(
            (diagonal < up) & (diagonal < left), _DIAGONAL, np.where((up < diagonal) & (up < left), _UP, _LEFT)
        )
        above = here
    first_steps = np.zeros(num_tokens, np.int64)
    end = num_steps  # the path has reached a token before this step
    for token in range(num_tokens - 1, 0, -1):
        first_steps[token] = step = np.flatnonzero(moves[token, :end] != _LEFT)[-1]
        end = step if moves[token, step] == _DIAGONAL else step + 1
    return first_steps


def split_words(
    decode: Callable[[list[int]], str], token_ids: Sequence[int], *, has_spaces: bool
) -> list[WordTokens]:
    """The words of some text, with the punctuation beside them. `has_spaces`: between the words of its language."""
    characters = _characters(decode, token_ids)
    words = list(_join(characters, _continues_word) if has_spaces else characters)
    closed = _join(_join_opening(words), _closes_word)
    return [WordTokens(each.text.strip(), each.first, each.last) for each in closed if each.text.strip()]


def _characters(decode: Callable[[list[int]], str], token_ids: Sequence[int]) -> Iterator[WordTokens]:
    """The tokens, those together that have the bytes of a character. What is left of a character at the end is not."""
    text, offset, first = decode(list(token_ids)), 0, 0
    for index in range(len(token_ids)):
        part = decode(list(token_ids[first : index + 1]))
        place = part.find(_REPLACEMENT)
        if place < 0 or text[offset + place : offset + place + 1] in ("", _REPLACEMENT):
            yield WordTokens(part, first, index)
            offset, first = offset + len(part), index + 1


def _continues_word(before: WordTokens, each: WordTokens) -> bool:
    return not each.text.startswith(" ") and each.text.strip() not in string.punctuation


def _closes_word(before: WordTokens, each: WordTokens) -> bool:
    return not before.text.endswith(" ") and each.text in _CLOSING


def _join(words: Iterable[WordTokens], belongs: Callable[[WordTokens, WordTokens], bool]) -> Iterator[WordTokens]:
    """The words, of which one that `belongs` to the one before it is joined to that."""
    joined: WordTokens | None = None
    for each in words:
        if joined is not None and belongs(joined, each):
            joined = WordTokens(joined.text + each.text, joined.first, each.last)
            continue
        if joined is not None:
            yield joined
        joined = each
    if joined is not None:
        yield joined


def _join_opening(words: Sequence[WordTokens]) -> Iterator[WordTokens]:
    """The words, in which opening punctuation with a space before it is joined to what it opens."""
    opening: WordTokens | None = None
    for index, each in enumerate(words):
        whole = each if opening is None else WordTokens(opening.text + each.text, opening.first, each.last)
        if index + 1 < len(words) and each.text.startswith(" ") and each.text.strip() in _OPENING:
            opening = whole
        else:
            yield whole
            opening = None
