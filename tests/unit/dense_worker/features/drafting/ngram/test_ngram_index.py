"""The index finds the last place after the longest n-gram, however the text has come together."""

from __future__ import annotations

import random
from array import array

from hypothesis import given
from hypothesis import strategies as st

from services.dense_worker.features.drafting.ngram.ngram_index import MIN_CAPACITY, Match, NgramIndex

LENGTHS = (2, 3, 5)


def longest_match(text: list[int], recent: list[int], lengths: tuple[int, ...] = LENGTHS) -> Match | None:
    """By looking at every place, the last first."""
    for length in reversed(lengths):
        if length > len(recent):
            continue
        for place in range(len(text) - 1, length - 1, -1):
            if text[place - length : place] == recent[-length:]:
                return Match(place, length)
    return None


def test_matches_are_those_that_a_search_of_the_whole_text_finds() -> None:
    """N-grams of equal hash hide one another, which is rare: a few are missed or found at a shorter length."""
    generator, num_equal, num_all = random.Random(0), 0, 0
    for _ in range(400):
        text = [generator.randrange(5) * 1000 for _ in range(generator.randrange(1, 120))]
        found, expected = NgramIndex(LENGTHS, text).find_end(), longest_match(text, text)
        num_all += 1
        num_equal += found == expected
    assert num_equal >= 0.93 * num_all


@given(st.lists(st.lists(st.integers(0, 3), max_size=30), max_size=12))
def test_what_is_found_really_occurred_before(parts: list[list[int]]) -> None:
    index = NgramIndex(LENGTHS)
    text: list[int] = []
    for part in parts:
        index.extend(part)
        text += part
        match = index.find_end()
        if match is not None:
            assert match.position < len(text)
            assert text[match.position - match.length : match.position] == text[-match.length :]


@given(st.lists(st.integers(0, 2**32 - 1) | st.integers(0, 2), max_size=60), st.integers(0, 60))
def test_tokens_added_one_by_one_or_together_are_found_alike(text: list[int], num_together: int) -> None:
    together = NgramIndex(LENGTHS, text[:num_together])
    one_by_one = NgramIndex(LENGTHS)
    for token_id in text:
        one_by_one.extend([token_id])
        one_by_one.note_ngrams()
    for token_id in text[num_together:]:
        together.extend([token_id])
    for end in range(len(text) + 1):
        recent = array("I", text[max(0, end - LENGTHS[-1]) : end])
        assert together.find(recent) == one_by_one.find(recent)


def test_a_text_that_outgrows_its_tables_is_still_found() -> None:
    """Both ways to grow: token by token, and by one long addition. All n-grams are different, so hits are exact."""
    text = list(range(5 * MIN_CAPACITY))
    one_by_one, together = NgramIndex((3,)), NgramIndex((3,), text)
    for token_id in text:
        one_by_one.extend([token_id])
        one_by_one.note_ngrams()
    for index in (one_by_one, together):
        found = [index.find(array("I", text[end - 3 : end])) for end in range(3, len(text))]
        num_right = sum(match == Match(end, 3) for end, match in enumerate(found, start=3))
        assert num_right > 0.6 * len(text), "newer n-grams of equal hash hide older ones"
