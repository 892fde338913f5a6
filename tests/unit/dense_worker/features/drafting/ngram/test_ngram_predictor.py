"""A predictor copies what followed the same tokens before, and learns how often that is right."""

from __future__ import annotations

import random

import pytest

from services.dense_worker.features.drafting.drafter import Acceptance
from services.dense_worker.features.drafting.ngram.ngram_index import NgramIndex
from services.dense_worker.features.drafting.ngram.ngram_predictor import SEPARATOR, NgramPredictor


def test_it_copies_what_followed_the_last_tokens() -> None:
    predictor = NgramPredictor((2, 3), Acceptance(), [1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3])
    assert predictor.draft(4) == [4, 5, 6, 7]
    predictor.follow([4])
    assert predictor.draft(3) == [5, 6, 7]
    predictor.follow([4, 9])
    assert predictor.draft(3) == [], "the last tokens have not occurred before"


def test_the_longest_match_counts_and_of_equal_ones_the_last() -> None:
    longest = NgramPredictor((2, 3), Acceptance(), [7, 1, 2, 50, 8, 1, 2, 60, 7, 1, 2])
    assert longest.draft(1) == [50]
    last = NgramPredictor((2,), Acceptance(), [7, 1, 2, 50, 8, 1, 2, 60, 7, 1, 2])
    assert last.draft(1) == [60]


def test_a_text_that_repeats_itself_goes_on_repeating() -> None:
    assert NgramPredictor((2,), Acceptance(), [5, 1, 2, 3, 1, 2, 3]).draft(8) == [1, 2, 3, 1, 2, 3, 1, 2]
    assert NgramPredictor((2,), Acceptance(), [9, 9, 9]).draft(4) == [9, 9, 9, 9]


def test_tokens_that_come_many_at_a_time_lead_to_the_same_place() -> None:
    prompt = [random.Random(1).randrange(4) for _ in range(50)]
    output = [random.Random(2).randrange(4) for _ in range(40)]
    together = NgramPredictor((3,), Acceptance(), prompt)
    together.follow(output)
    assert together.draft(5) == NgramPredictor((3,), Acceptance(), prompt + output).draft(5)


def test_an_earlier_text_is_copied_up_to_its_end_when_it_matches_further_back() -> None:
    earlier = NgramIndex((2, 3), [30, 1, 2, 40, 41, SEPARATOR])
    predictor = NgramPredictor((2, 3), Acceptance(), [9, 1, 2, 50, 30, 1, 2], [earlier])
    assert predictor.draft(5) == [40, 41]
    predictor.follow([40, 41])
    assert predictor.draft(5) == [], "that text has no further tokens"
    own_first = NgramPredictor((2, 3), Acceptance(), [30, 1, 2, 50, 30, 1, 2], [earlier])
    assert own_first.draft(1) == [50]


def test_drafts_are_judged_also_when_nobody_uses_them() -> None:
    typical = Acceptance()
    repeating = NgramPredictor((2,), typical.begin(), [1, 2, 3] * 3)
    repeating.follow([1, 2, 3, 1])
    repeating.follow([1, 2, 3, 1, 2, 3, 1, 2])
    assert repeating.chances(1)[0] > Acceptance().later
    wrong = NgramPredictor((2,), typical.begin(), [1, 2, 3, 1, 2])
    for end in range(1, 30):  # after [1, 2] always comes another token
        wrong.follow([token for index in range(end) for token in (10 + index, 1, 2)])
    assert wrong.chances(1)[0] < 0.1
    assert typical.first < Acceptance().first, "a new sequence begins with what others have shown"


def test_chances_fall_with_each_further_token() -> None:
    acceptance = Acceptance(first=0.5, later=0.8)
    predictor = NgramPredictor((2,), acceptance, [1, 2, 3, 1, 2])
    assert predictor.chances(3) == pytest.approx([0.5, 0.4, 0.32])
    assert NgramPredictor((2,), acceptance, [1, 2, 3]).chances(3) == []


def test_what_may_wait_changes_no_drafts() -> None:
    generator = random.Random(3)
    settling, waiting = (NgramPredictor((2, 3), Acceptance(), [1, 2, 3, 4, 5] * 3) for _ in range(2))
    output: list[int] = []
    for _ in range(60):
        right = waiting.draft(8)
        output += right if right and generator.random() < 0.8 else [generator.randrange(6)]
        for each in (settling, waiting):
            each.follow(output)
        settling.settle()
        assert settling.draft(8) == waiting.draft(8)
