"""A small sample of the matrix, without kills; `make chaos` has the whole one."""

from __future__ import annotations

import itertools
from pathlib import Path
from random import Random

import pytest

from services.pb import gateway_pb2
from tests.chaos.forms.answers import Answer
from tests.chaos.forms.cases import KINDS, OPTIONS, REASONING, Case, NotValid, check_expression, check_json, make_case
from tests.chaos.forms.matrix import Count, answer_all, answer_whole, check_beams, judge, num_steps_with_drafts, server
from tests.chaos.forms.thinking_model import make_thinking_model

NO_DRAFTS = 1e-6  # a penalty that changes no token, but sequences with a penalty have no drafts


def sample_cases(random: Random) -> list[Case]:
    """Every kind of form beside every option, and beside and without reasoning, greedy and not."""
    found = []
    for index, (kind, option) in enumerate(itertools.product(KINDS, OPTIONS)):
        reasoning, temperature = REASONING[index % 3], float(index % 2)
        found.append(make_case(random, kind, reasoning, 1 + (index % 5 == 0), option, temperature))
    return found


def without_drafts(case: Case) -> Case:
    message = gateway_pb2.GenerateRequest()
    message.CopyFrom(case.message)
    message.sampling.frequency_penalty = NO_DRAFTS
    return Case(case.name, message, case.check)


def test_answers_have_their_form_and_are_those_without_drafts(tmp_path: Path) -> None:
    cases = sample_cases(Random(4))
    with server(tmp_path, make_thinking_model(tmp_path / "model"), "off", num_layers=1) as services:
        found, greedy = answer_all(services, cases), [case for case in cases if not case.message.sampling.temperature]
        expected = answer_all(services, [without_drafts(case) for case in greedy])
        whole = answer_whole(services, cases)
        assert check_beams(services) is None
        services.wait_idle()
    count, others = Count(), iter(expected)
    pairs = zip(cases, found, strict=True)
    truth = [answers if case.message.sampling.temperature else next(others) for case, answers in pairs]
    judge(cases, found, truth, whole, count)
    assert (count.invalid, count.different) == ([], [])
    assert count.num_answers == 30 and count.num_whole > 15 and num_steps_with_drafts(tmp_path) > 5


@pytest.mark.parametrize("text", ["result = 1 +", "result = print(x)", "1 + 2", "result = [1]"])
def test_its_judge_of_expressions_refuses_other_texts(text: str) -> None:
    with pytest.raises((NotValid, SyntaxError)):
        check_expression(Answer(text=text))


def test_it_notices_wrong_answers() -> None:
    case = make_case(Random(1), "json_schema", "off", 1, "none", 0.0)
    stopped = gateway_pb2.FINISH_REASON_STOP
    broken, without_cause = Answer('{"a": 1', reason=stopped), Answer("[]", stop="x", reason=stopped)
    for answer in (Answer(reason=gateway_pb2.FINISH_REASON_LENGTH), broken, without_cause):
        count = Count()
        judge([case], [[answer]], [[Answer()]], {}, count)
        assert len(count.invalid) == len(count.different) == 1
    with pytest.raises(Exception, match="is not of type"):
        check_json({"type": "object"})(Answer("3"))
