"""The limit of time for a form's masks: a single slow step condemns no form, one that is always slow does.

And what a form takes of memory when it is compiled.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterator

import pytest

from services.common.structured_output import Constraint, StructuredOutput
from services.grammar import trial
from services.grammar.grammar_error import SlowGrammarError
from services.grammar.matcher import compile_grammar
from tests.support.dense.forms import Forms, make_vocabulary
from tests.support.process_memory import resident_bytes

FORM = StructuredOutput(Constraint.REGEX, "[0-9]{40}")


@pytest.fixture(scope="module")
def forms(tmp_path_factory: pytest.TempPathFactory) -> Forms:
    return Forms(make_vocabulary(tmp_path_factory.mktemp("tokenizer")))


def clock(slow_steps: Iterator[bool]) -> Iterator[float]:
    """Times at the beginning and the end of each step."""
    now_s = 0.0
    for is_slow in slow_steps:
        yield now_s
        now_s += 2 * trial.MAX_MASK_S if is_slow else trial.MAX_MASK_S / 2
        yield now_s


def try_grammar(forms: Forms, slow_steps: Iterator[bool], monkeypatch: pytest.MonkeyPatch) -> trial.Tried:
    times = clock(slow_steps)
    monkeypatch.setattr(trial.time, "thread_time", lambda: next(times))
    return trial.try_grammar(forms.tokenizer, forms.vocabulary, FORM)


@pytest.mark.parametrize("num_slow_attempts", range(trial.NUM_ATTEMPTS))
def test_a_walk_that_was_slow_is_taken_again(
    forms: Forms, num_slow_attempts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt = [False, False, True]  # the third step is slow, and ends the attempt
    slow_steps = itertools.chain(attempt * num_slow_attempts, itertools.repeat(False))
    assert try_grammar(forms, slow_steps, monkeypatch)


def test_a_walk_that_is_always_slow_condemns_the_form(forms: Forms, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SlowGrammarError, match=r"100 ms to find .* follow 2 tokens .* 50 ms"):
        try_grammar(forms, itertools.cycle([False, False, True]), monkeypatch)


def test_the_memory_of_a_form_is_what_a_process_grows_by_that_compiles_many(forms: Forms) -> None:
    values = [f"value {i}" for i in range(20_000)]
    many = [StructuredOutput(Constraint.JSON_SCHEMA, json.dumps({"enum": [str(i), *values]})) for i in range(5)]
    tried = [trial.try_grammar(forms.tokenizer, forms.vocabulary, each) for each in many]
    before = resident_bytes(os.getpid())
    compiled = [compile_grammar(forms.tokenizer, each.grammar) for each in tried * 4]
    grown = resident_bytes(os.getpid()) - before
    assert len(compiled) == 4 * len(tried)
    told = 4 * sum(each.num_bytes for each in tried)
    # A part lies in memory that the process had before, which the trials have used, and a part of it is free.
    assert grown / 2 < told < 2 * grown + 60 * 2**20
    assert min(each.num_bytes for each in tried) > 3 * 2**20
    small = trial.try_grammar(forms.tokenizer, forms.vocabulary, FORM)
    assert small.num_bytes < 2**20
