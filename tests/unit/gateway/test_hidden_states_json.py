"""Hidden states in answers are JSON even where a value is no number, and only those are kept that may be shown."""

from __future__ import annotations

import json
from unittest.mock import Mock

import numpy as np
import pytest
from annotated_types import Le

from services.common.config import SchedulerSection
from services.common.sampling_params import SamplingParams
from services.gateway.features.feature import RequestSize
from services.gateway.features.hidden_states import OF_ANSWER, HiddenStates, HiddenStatesList
from services.gateway.features.token_rows import RowRecord, TokenRows
from services.gateway.http.json_pieces import json_line, json_pieces
from services.step import SequenceSpec


def strict(encoded: bytes) -> object:
    """What a reader finds that takes RFC 8259 at its word."""

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is no JSON")

    return json.loads(encoded, parse_constant=refuse)


def test_what_is_no_number_is_null() -> None:
    rows = np.array([[1.0, 2.0], [0.5, np.nan], [np.inf, -1.5]], "<f4")
    states = HiddenStatesList(TokenRows(3, rows.tobytes()), num_prompt_tokens=1)
    assert strict(json_line({"hidden_states": states.last})) == {"hidden_states": [None, -1.5]}
    for encoded in (b"".join(json_pieces(states)), json_line(states)):  # of a long prompt, and of a short one
        assert strict(encoded) == [[[1.0, 2.0]], [0.5, None], [None, -1.5]]


def test_without_a_token_of_the_answer_there_is_no_last_row() -> None:
    assert last_of(take(record(), 1, is_last=True)) == []


NUM_PROMPT_TOKENS, WIDTH = 5, 4
SPEC = SequenceSpec("a", list(range(NUM_PROMPT_TOKENS)), SamplingParams(), 1000, features={"hidden_states": OF_ANSWER})


def record(*, may_be_cut: bool = False) -> RowRecord:
    made = HiddenStates().record(SPEC, may_be_cut=may_be_cut)
    assert isinstance(made, RowRecord)
    return made


def keep(record: RowRecord, start: int, *firsts: float) -> None:
    """The rows of output tokens from index `start` on, with these numbers in front."""
    rows = np.array([[first] * WIDTH for first in firsts], "<f4")
    record.keep(NUM_PROMPT_TOKENS + start, len(firsts), rows.tobytes())


def take(record: RowRecord, num_tokens: int, *, is_last: bool) -> TokenRows | None:
    reporter = Mock()
    reporter.spec = SPEC
    return record.take(reporter, num_tokens, is_last)


def last_of(rows: TokenRows | None) -> list[float | None]:
    assert rows is not None
    return HiddenStatesList(rows, NUM_PROMPT_TOKENS).last


@pytest.mark.parametrize("may_be_cut", [False, True])
def test_the_last_row_is_that_of_the_last_token_but_one(may_be_cut: bool) -> None:
    for sizes in ((300,), (1,) * 300, (7, 0, 290, 3), (1, 1, 298)):
        of_answer, num_kept = record(may_be_cut=may_be_cut), 0
        for num_tokens in sizes:
            for index in range(num_kept, num_kept + num_tokens):
                keep(of_answer, index, index, -1.0)  # and that of a drafted token, which may be another one
            num_kept += num_tokens
            found = take(of_answer, num_tokens, is_last=num_kept == 300)
        assert last_of(found) == [298.0] * WIDTH


def test_the_row_that_counts_stays_behind_as_many_as_can_be_drafted_in_vain() -> None:
    limits = SchedulerSection.model_fields["num_speculative_tokens"].metadata
    most_drafts = max(each.le for each in limits if isinstance(each, Le))
    of_answer = record()
    keep(of_answer, 0, *range(10))
    keep(of_answer, 10, 10, *[-1.0] * most_drafts)
    assert last_of(take(of_answer, 12, is_last=True)) == [10.0] * WIDTH


def test_an_answer_that_is_cut_has_the_row_of_its_own_last_token_but_one() -> None:
    of_answer = record(may_be_cut=True)
    keep(of_answer, 0, *range(200))
    assert take(of_answer, 20, is_last=False) is None
    assert last_of(take(of_answer, 11, is_last=True)) == [29.0] * WIDTH


def test_rows_that_are_computed_again_change_nothing() -> None:
    of_answer = record()
    keep(of_answer, 0, *range(150))
    keep(of_answer, 0, *range(100))
    keep(of_answer, 100, *range(100, 152))
    assert last_of(take(of_answer, 153, is_last=True)) == [151.0] * WIDTH


def test_an_answer_holds_memory_for_what_it_keeps() -> None:
    def num_held(features: dict[str, bytes], *, may_be_cut: bool = False) -> int:
        spec = SequenceSpec("a", [1] * 4000, SamplingParams(), 10_000, features=features)
        need = HiddenStates().held(RequestSize(spec, 8, 10_000, 1000, 4096, 0, may_be_cut=may_be_cut))
        assert need is not None
        return need.num_bytes

    of_answer = {"hidden_states": OF_ANSWER}
    assert num_held({"hidden_states": b""}) == 8 * 14_000 * 4096 * 56
    assert num_held(of_answer) == 8 * 4096 * (56 + 65 * 4)
    assert num_held(of_answer, may_be_cut=True) == 8 * 4096 * (56 + 10_000 * 4)
    long = record()
    for index in range(10_000):
        keep(long, index, index)
    assert len(long._values) <= 65 * WIDTH * 4
