"""The answers of several attention workers, as if one had given them."""

from __future__ import annotations

import pytest

from services.common.errors import PeerError
from services.dense_worker.ranks.rank_answers import RankAnswers, Reopening
from services.step import NewSequence, PlanAccepted, SequenceOpened, StepPlan

NEW = NewSequence(7, "request", tuple(range(40)), 40)
OPENS = StepPlan(1, new_sequences=(NEW,))
CLOSES = StepPlan(2, close_seq_ids=(7,))


def opened(num_cached: int, *, pinned: int = 0, freed: int = 0) -> SequenceOpened:
    return SequenceOpened(7, num_cached, pinned, -(-num_cached // 16), freed)


def test_an_answer_waits_for_all_ranks() -> None:
    answers = RankAnswers([100, 100])
    answers.note_plan(OPENS)
    assert answers.opened(1, opened(32, pinned=2)) == []
    assert answers.opened(0, opened(32, pinned=2)) == opened(32, pinned=2)
    assert answers.num_free_blocks == 98


def test_a_sequence_is_opened_again_where_more_of_it_is_cached() -> None:
    """Rank 1 was a step behind when the dense workers died: the others give up what it lacks."""
    answers = RankAnswers([100, 90])
    answers.note_plan(OPENS)
    answers.opened(0, opened(33))
    [again] = answers.opened(1, opened(32))
    assert isinstance(again, Reopening) and again.rank == 0
    assert again.new.max_cached_tokens == 32 and again.new.token_ids == NEW.token_ids
    merged = answers.opened(0, opened(32, freed=1))
    assert isinstance(merged, SequenceOpened)
    assert (merged.num_cached_tokens, merged.num_held_blocks) == (32, 2)
    assert merged.num_freed_blocks == 0 and answers.num_free_blocks == 90, "rank 1, which has fewer, has got none back"


def test_a_rank_may_keep_less_than_it_was_asked_for() -> None:
    answers = RankAnswers([100, 100, 100])
    answers.note_plan(OPENS)
    answers.opened(0, opened(33))
    answers.opened(1, opened(20))
    again = answers.opened(2, opened(33))
    assert [each.rank for each in again] == [0, 2]
    answers.opened(0, opened(16))  # it can go back to the end of a block only
    again = answers.opened(2, opened(20))
    assert {each.rank: each.new.max_cached_tokens for each in again} == {1: 16, 2: 16}
    answers.opened(1, opened(16))
    merged = answers.opened(2, opened(16))
    assert isinstance(merged, SequenceOpened) and merged.num_cached_tokens == 16


def test_the_free_blocks_are_those_of_the_rank_with_the_fewest() -> None:
    """Two sequences share blocks on rank 0 and not on rank 1: what one rank frees does not count before the other."""
    answers = RankAnswers([10, 10])
    answers.note_plan(OPENS)
    answers.opened(0, opened(32))
    merged = answers.opened(1, opened(32, pinned=2))
    assert isinstance(merged, SequenceOpened) and merged.num_pinned_blocks == 2
    answers.note_plan(CLOSES)
    assert answers.accepted(0, PlanAccepted(2, 0, 10)) is None
    merged = answers.accepted(1, PlanAccepted(2, 2, 10))
    assert merged is not None and (merged.num_freed_blocks, merged.num_free_blocks) == (2, 10)


def test_errors_are_passed_on_at_once_and_only_once() -> None:
    answers = RankAnswers([10, 10])
    plan = StepPlan(3)
    answers.note_plan(plan)
    failed = PlanAccepted(3, errors={7: "no room"})
    assert answers.accepted(1, failed) == failed
    assert answers.accepted(0, failed) is None


def test_a_sequence_that_all_refuse_is_refused() -> None:
    answers = RankAnswers([10, 10])
    answers.note_plan(OPENS)
    refused = SequenceOpened(7, error="too long")
    answers.opened(0, refused)
    assert answers.opened(1, refused) == refused


def test_ranks_that_disagree_end_the_attachment() -> None:
    answers = RankAnswers([10, 10])
    answers.note_plan(OPENS)
    answers.opened(0, opened(0))
    with pytest.raises(PeerError, match="only some ranks have opened sequence 7: no room"):
        answers.opened(1, SequenceOpened(7, error="no room"))
