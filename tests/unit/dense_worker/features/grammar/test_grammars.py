"""Grammars are made in threads, once for equal forms, and follow an output that a sequence already has."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llguidance import LLMatcher, LLParserLimits

from services.common.errors import InvalidRequest
from services.common.process import low_priority_thread
from services.common.sampling_params import SamplingParams
from services.common.structured_output import Constraint, StructuredOutput
from services.dense_worker.engine.sequence import Sequence
from services.dense_worker.features.grammar import grammars as module
from services.dense_worker.features.grammar.grammars import MAX_SHARING, NICENESS, Grammars
from services.grammar import matcher as matcher_module
from services.grammar.grammar_error import GrammarError
from services.grammar.matcher import CREDIT_S, GrammarMatcher
from services.grammar.vocabulary import Vocabulary
from tests.support.dense.forms import EOS, Forms, allowed, make_vocabulary
from tests.support.dense.sequences import ask, new_sequence


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Vocabulary:
    return make_vocabulary(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def grammars(vocabulary: Vocabulary) -> Iterator[Grammars]:
    made = Grammars(lambda: vocabulary)
    yield made
    made.close()


def sequence(pattern: str, output: list[int] | None = None, stop: tuple[int, ...] = (EOS,)) -> Sequence:
    sampling = SamplingParams(structured_output=StructuredOutput(Constraint.REGEX, pattern))
    return new_sequence(1, "r", [5], sampling, 100, frozenset(stop), output_token_ids=output or [])


MAX_STATES = 100


@pytest.fixture
def few_states(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lexers may have `MAX_STATES` states. `LONG` uses them up after some twenty tokens."""
    limits = LLParserLimits(max_lexer_states=MAX_STATES, verbose_errors=False)
    monkeypatch.setattr(matcher_module, "limits", lambda: limits)


LONG = "([a-z]x?){500}"


def explode(matcher: GrammarMatcher, x: int) -> None:
    """Goes on until the lexer has too many states."""
    for _ in range(2 * MAX_STATES):
        if matcher.is_running and allowed(matcher)[x]:
            GrammarMatcher.consume([(matcher, x)])
    assert matcher.error is not None and "too many states" in matcher.error


def prepared(grammars: Grammars, *sequences: Sequence) -> list[GrammarMatcher]:
    async def make() -> list[GrammarMatcher]:
        return await asyncio.gather(*(grammars.make(each.spec, each.output_token_ids) for each in sequences))

    return asyncio.run(make())


def test_a_grammar_is_where_the_output_of_its_sequence_is(grammars: Grammars, vocabulary: Vocabulary) -> None:
    forms = Forms(vocabulary)
    [begun, resumed] = prepared(grammars, sequence("abc"), sequence("abc", forms.tokens("ab")))
    assert set(np.flatnonzero(allowed(begun))) == set(forms.tokens("a"))
    assert set(np.flatnonzero(allowed(resumed))) == set(forms.tokens("c"))


def test_grammars_of_equal_forms_move_independently(grammars: Grammars, vocabulary: Vocabulary) -> None:
    forms = Forms(vocabulary)
    first, second = prepared(grammars, sequence("[ab]+c"), sequence("[ab]+c"))
    assert len(grammars._kept) == 1
    GrammarMatcher.consume([(first, token_id) for token_id in forms.tokens("abc")])
    [third] = prepared(grammars, sequence("[ab]+c"))
    assert first.is_complete and not second.is_complete
    assert (allowed(second) == allowed(third)).all()


@pytest.mark.usefixtures("few_states")
def test_a_form_that_explodes_ends_one_sequence_and_no_other_of_the_same_form(
    grammars: Grammars, vocabulary: Vocabulary
) -> None:
    """They share a lexer until one of them has used up its states."""
    [x] = Forms(vocabulary).tokens("x")
    [first] = prepared(grammars, sequence(LONG))
    second, third = prepared(grammars, sequence(LONG), sequence(LONG))
    [shared] = grammars._kept.values()
    GrammarMatcher.consume([(second, x), (third, x)] * 3)
    expected = allowed(second)
    explode(first, x)
    assert not grammars._kept and grammars._num_bytes == 0, "the states go when the sequences end"
    assert (allowed(second) == expected).all(), "it finds its mask with a lexer of its own"
    GrammarMatcher.consume([(third, x)] * 4)
    for matcher in (second, third):
        GrammarMatcher.consume([(matcher, x)] * 4)
        assert matcher.error is None and allowed(matcher)[x] and not allowed(matcher).all()
    explode(second, x)
    assert allowed(third)[x] and third.error is None
    [later] = prepared(grammars, sequence(LONG))
    assert allowed(later)[x] and not allowed(later).all()
    [kept] = grammars._kept.values()
    assert kept is not shared and grammars._num_bytes == len(LONG)


@pytest.mark.usefixtures("few_states")
def test_a_form_that_takes_long_to_compile_is_not_compiled_on_the_engine_thread(
    grammars: Grammars, vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CREDIT_S", -1.0)
    [x] = Forms(vocabulary).tokens("x")
    [first] = prepared(grammars, sequence(LONG))
    [second] = prepared(grammars, sequence(LONG))
    explode(first, x)
    GrammarMatcher.consume([(second, x)])
    assert allowed(second).all() and second.error is not None and "too many states" in second.error
    [later] = prepared(grammars, sequence(LONG))
    assert allowed(later)[x] and not allowed(later).all(), "it was compiled again, in a thread"


def slow_to_remake(matcher: GrammarMatcher, remade: list[GrammarMatcher], took_s: float) -> None:
    """Making another lexer for this matcher takes so much processor time from now on. `remade` gets it then."""
    quick = matcher.remake
    assert quick is not None

    def remake() -> LLMatcher:
        end = time.thread_time() + took_s
        while time.thread_time() < end:
            pass
        remade.append(matcher)
        return quick()

    matcher.remake = remake


@pytest.mark.parametrize("has_masks", [False, True])
@pytest.mark.usefixtures("few_states")
def test_one_step_waits_for_new_lexers_only_as_long_as_for_one_sequence(
    grammars: Grammars, vocabulary: Vocabulary, has_masks: bool
) -> None:
    """Eight sequences need one at once. All of them together would stop the others for seconds."""
    a, x = Forms(vocabulary).tokens("ax")
    [first] = prepared(grammars, sequence(LONG))
    others = prepared(grammars, *(sequence(LONG) for _ in range(8)))
    GrammarMatcher.consume([(matcher, x) for matcher in others for _ in range(3)])
    explode(first, x)
    remade: list[GrammarMatcher] = []
    for matcher in others:
        slow_to_remake(matcher, remade, 0.6 * CREDIT_S)
    if has_masks:
        GrammarMatcher.fill_masks(others, np.zeros((len(others), others[0].num_words), np.uint32))
    else:
        GrammarMatcher.consume([(matcher, a) for matcher in others])  # no lexer has this state yet
    assert 1 <= len(remade) <= 2
    left = [matcher for matcher in others if matcher not in remade]
    assert all(matcher.error is not None and "too many states" in matcher.error for matcher in left)
    assert remade[0].error is None and allowed(remade[0])[x] and not allowed(remade[0]).all()


@pytest.mark.usefixtures("few_states")
def test_following_a_long_text_with_a_new_lexer_has_a_limit(
    grammars: Grammars, vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, x = Forms(vocabulary).tokens("ax")
    [first] = prepared(grammars, sequence(LONG))
    [second] = prepared(grammars, sequence(LONG))
    explode(first, x)
    quick = second.remake
    assert quick is not None

    def remake() -> LLMatcher:
        monkeypatch.setattr(matcher_module, "CREDIT_S", 0.0)
        return quick()

    second.remake = remake
    GrammarMatcher.consume([(second, a)])
    assert second.error == "it took more than 0 ms to follow 1 tokens again" and allowed(second).all()


@pytest.mark.usefixtures("few_states")
@pytest.mark.parametrize("can_remake", [True, False])
def test_a_mask_that_fails_ahead_is_found_with_another_lexer(
    vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch, can_remake: bool
) -> None:
    monkeypatch.setattr(matcher_module, "AHEAD_S", -1.0)
    grammars = Grammars(lambda: vocabulary, 2)
    [x] = Forms(vocabulary).tokens("x")
    [first] = prepared(grammars, sequence(LONG))
    others = prepared(grammars, *(sequence(LONG) for _ in range(2)))
    GrammarMatcher.consume([(matcher, x) for matcher in others for _ in range(3)])
    explode(first, x)
    if not can_remake:
        others[1].remake = None
    GrammarMatcher.find_ahead(others)
    masks = np.zeros((2, others[0].num_words), np.uint32)
    GrammarMatcher.fill_masks(others, masks)
    assert others[0].is_running and (masks[0] >> (x & 31) & 1)[x >> 5] and not (masks[0] == 0xFFFFFFFF).any()
    assert others[1].is_running == can_remake and (others[1].error is None) == can_remake
    grammars.close()


def starts_of(matchers: list[GrammarMatcher]) -> list[int]:
    """How many matchers share each lexer."""
    return sorted(Counter(id(matcher._start) for matcher in matchers).values())


def test_many_sequences_of_a_form_do_not_all_share_a_lexer(vocabulary: Vocabulary) -> None:
    grammars, forms = Grammars(lambda: vocabulary, num_mask_threads=3), Forms(vocabulary)
    matchers = [prepared(grammars, sequence("ab+", forms.tokens("ab")))[0] for _ in range(20)]
    assert starts_of(matchers) == [4, MAX_SHARING, MAX_SHARING]
    matchers += [prepared(grammars, sequence("ab+"))[0] for _ in range(10)]
    assert starts_of(matchers) == [10, 10, 10], "at most as many as there are threads"
    masks = np.empty((30, matchers[0].num_words), np.uint32)
    for matcher in matchers:
        matcher._mask_s = 1.0  # so that threads find the masks
    GrammarMatcher.fill_masks(matchers, masks)
    expected = [*[{*forms.tokens("b"), EOS}] * 20, *[{*forms.tokens("a")}] * 10]
    bits = np.unpackbits(masks.view(np.uint8), axis=1, bitorder="little")
    assert [set(np.flatnonzero(row).tolist()) for row in bits] == expected
    del matchers, matcher
    gc.collect()
    assert starts_of([prepared(grammars, sequence("ab+"))[0] for _ in range(3)]) == [1, 1, 1], "the ended ones are gone"
    grammars.close()


def test_a_form_that_takes_long_to_compile_has_one_lexer(
    vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_AGAIN_S", 0.0)
    grammars = Grammars(lambda: vocabulary, num_mask_threads=3)
    assert starts_of([prepared(grammars, sequence("a+"))[0] for _ in range(20)]) == [20]
    grammars.close()


def test_eos_may_end_only_those_that_stop_at_it(grammars: Grammars) -> None:
    ends, goes_on = prepared(grammars, sequence("a*"), sequence("a*", stop=(7,)))
    assert allowed(ends)[EOS] and not allowed(goes_on)[EOS]


def test_what_is_kept_has_a_bound(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_KEPT", 3)
    prepared(grammars, *(sequence(f"a{{{i}}}b") for i in range(8)))
    assert len(grammars._kept) == 3
    monkeypatch.setattr(module, "MAX_KEPT_BYTES", 0)
    [grammar] = prepared(grammars, sequence("xy"))
    assert not grammars._kept and grammars._num_bytes == 0 and grammar.is_running


@pytest.mark.parametrize("pattern", ["(", "(?=a)", "a{"])
def test_a_bad_form_is_an_error_of_its_sequence(grammars: Grammars, pattern: str) -> None:
    with pytest.raises(InvalidRequest, match="structured_output cannot be used"):
        prepared(grammars, sequence(pattern))
    assert prepared(grammars, sequence("a"))


def test_a_tokenizer_that_cannot_be_used_is_an_error_of_each_form() -> None:
    def read() -> Vocabulary:
        raise GrammarError("structured output is not possible with the tokenizer of this model")

    broken = Grammars(read)
    for _ in range(2):
        with pytest.raises(InvalidRequest, match="tokenizer of this model"):
            prepared(broken, sequence("a"))
    broken.close()


def test_clients_take_turns(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[tuple[str, int]] = []
    lower, lock = module.lower, threading.Lock()

    def noted(form: StructuredOutput, *rest: Any) -> str:
        with lock:
            order.append((form.text[0], int(form.text[1:])))
        return lower(form, *rest)

    monkeypatch.setattr(module, "lower", noted)
    busy = [sequence(f"x{i}") for i in range(10)]
    other = [sequence(f"y{i}") for i in range(3)]
    for each in busy:
        ask(each, client=1)
    for each in other:
        ask(each, client=2)
    prepared(grammars, *busy, *other)
    # With two threads, two of the busy client's forms have begun before, and a third has asked before the others.
    assert order.index(("y", 0)) < order.index(("x", 5)), order
    assert order.index(("y", 2)) < order.index(("x", 7)), order
    assert len(order) == 13


def test_nothing_is_made_on_the_thread_that_asks(vocabulary: Vocabulary) -> None:
    threads: list[str] = []

    def read() -> Vocabulary:
        threads.append(threading.current_thread().name)
        return vocabulary

    made = Grammars(read)
    prepared(made, sequence("a"))
    made.close()
    assert threads and all(name.startswith("grammar") for name in threads)


def test_threads_that_compile_leave_the_cpu_to_steps_and_those_that_find_masks_do_not(vocabulary: Vocabulary) -> None:
    """Also where a standby has made all this at low priority."""
    before = {*os.listdir("/proc/self/task")}
    with low_priority_thread() as thread:
        made = thread.submit(Grammars, lambda: vocabulary, 3).result()
        thread.submit(made.begin).result().result()
    prepared(made, sequence("a"))
    own = os.getpriority(os.PRIO_PROCESS, 0)
    assert own < 19, "else nothing can have a lower one"
    deadline = time.monotonic() + 30.0
    while True:  # the thread that has read the vocabulary may still end
        threads = {*os.listdir("/proc/self/task")} - before
        priorities = Counter(priority(each) for each in threads)
        if set(priorities) == {own, min(own + NICENESS, 19)}:
            break
        assert time.monotonic() < deadline, priorities
    assert priorities[own] >= 3, "that find masks"
    made.close()


def priority(thread: str) -> int | None:
    """None: it has ended."""
    try:
        return os.getpriority(os.PRIO_PROCESS, int(thread))
    except ProcessLookupError:
        return None


def test_a_vocabulary_without_eos_gets_a_token_that_no_model_has(tmp_path: Path) -> None:
    from services.grammar.vocabulary import read_vocabulary

    made = read_vocabulary(tmp_path, 160, [2_000], is_optional=True)
    assert made.eos_token_ids == (256,) and made.num_tokens == 257
    assert made.load().eos_tokens == [256]
