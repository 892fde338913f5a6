"""A matcher follows its sequence: over pauses, crashes and errors, up to the end of the form."""

from __future__ import annotations

import itertools
import json
import random
import re
import sys
import threading
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st

from services.common.structured_output import Constraint, StructuredOutput
from services.grammar import matcher as matcher_module
from services.grammar.grammar_error import GrammarError
from services.grammar.matcher import GrammarMatcher, MaskThreads
from tests.support.dense.forms import EOS, Forms, allowed, make_vocabulary, schema

SPELLED = StructuredOutput(Constraint.REGEX, "abc?")
MAX_TOKENS = 400


@pytest.fixture(scope="module")
def forms(tmp_path_factory: pytest.TempPathFactory) -> Forms:
    return Forms(make_vocabulary(tmp_path_factory.mktemp("tokenizer")))


def consume(matcher: GrammarMatcher, *token_ids: int) -> None:
    for token_id in token_ids:
        GrammarMatcher.consume([(matcher, token_id)])


def test_eos_may_come_when_the_text_has_the_form_and_not_before(forms: Forms) -> None:
    a, b, c = forms.tokens("abc")
    matcher = forms.matcher(SPELLED)
    for token_id, expected in ((a, {a}), (b, {b})):
        assert set(np.flatnonzero(allowed(matcher))) == expected
        consume(matcher, token_id)
    assert set(np.flatnonzero(allowed(matcher))) == {c, EOS}
    consume(matcher, EOS)
    assert matcher.is_complete


def test_a_form_that_nothing_can_follow_is_complete_without_eos(forms: Forms) -> None:
    matcher = forms.matcher(SPELLED)
    consume(matcher, *forms.tokens("abc"))
    assert matcher.is_complete
    assert allowed(matcher).all(), "what a wasted step samples has no meaning"


def test_where_eos_is_ignored_it_comes_only_if_nothing_else_can(forms: Forms) -> None:
    matcher = forms.matcher(SPELLED, may_end=False)
    consume(matcher, *forms.tokens("ab"))
    assert set(np.flatnonzero(allowed(matcher))) == set(forms.tokens("c"))
    only_empty = forms.matcher(StructuredOutput(Constraint.REGEX, ""), may_end=False)
    assert set(np.flatnonzero(allowed(only_empty))) == {EOS}


def test_a_token_that_does_not_fit_fails_this_matcher_alone(forms: Forms) -> None:
    bad, good = forms.matcher(SPELLED), forms.matcher(SPELLED)
    a, b, _ = forms.tokens("abc")
    GrammarMatcher.consume([(bad, b), (good, a)])
    assert bad.error and not bad.is_running and not bad.is_complete
    assert good.is_running and good.error is None
    masks = np.empty((2, bad.num_words), dtype=np.uint32)
    GrammarMatcher.fill_masks([bad, good], masks)
    assert (masks[0] == 0xFFFFFFFF).all() and (masks[1] != 0).sum() == 1
    consume(bad, a)  # nothing more happens
    assert bad.error


def test_a_form_that_explodes_later_fails_then(forms: Forms) -> None:
    matcher = forms.matcher(StructuredOutput(Constraint.GRAMMAR, "start: A B\nA: /x{30}/\nB: /((a{100}){100}){100}/"))
    consume(matcher, *forms.tokens("x" * 30))
    generator, num_steps = random.Random(1), 0
    while matcher.is_running and num_steps < 10:
        choices = np.flatnonzero(allowed(matcher))
        if matcher.is_running:
            consume(matcher, int(generator.choice(choices.tolist())))
        num_steps += 1
    assert matcher.error is not None and len(matcher.error) <= 300


@pytest.mark.parametrize("num_followed", [0, 1, 5, 9])
def test_it_catches_up_with_any_output(forms: Forms, num_followed: int) -> None:
    form = schema({"type": "array", "items": {"type": "integer"}})
    tokens = forms.tokens("[12, 34, 5")
    expected = forms.matcher(form)
    consume(expected, *tokens)
    matcher = forms.matcher(form)
    consume(matcher, *tokens[:num_followed])
    matcher.sync(tokens)
    assert (allowed(matcher) == allowed(expected)).all()


def test_it_goes_back_when_the_output_is_another_one(forms: Forms) -> None:
    form = StructuredOutput(Constraint.REGEX, "(ab|cd)*")
    for other in ("", "ab", "cdab", "abc"):
        matcher = forms.matcher(form)
        consume(matcher, *forms.tokens("abcd"))
        matcher.sync(forms.tokens(other))
        expected = forms.matcher(form)
        consume(expected, *forms.tokens(other))
        assert (allowed(matcher) == allowed(expected)).all()
    broken = forms.matcher(form)
    consume(broken, *forms.tokens("x"))
    broken.sync([])
    assert broken.is_running


# Schemas of everything that random data can be judged by: `jsonschema` is the judge.
NAMES = st.sampled_from(["a", "name", "x y", "é", '"q"', "$ref", ""])
LEAVES = st.one_of(
    st.sampled_from([{"type": name} for name in ("string", "integer", "number", "boolean", "null")]),
    st.builds(lambda low, n: {"type": "integer", "minimum": low, "maximum": low + n}, st.integers(-99, 99),
              st.integers(0, 50)),
    st.builds(lambda low, n: {"type": "number", "exclusiveMinimum": low, "maximum": low + n}, st.integers(-9, 9),
              st.integers(1, 5)),
    st.builds(lambda low, n: {"type": "string", "minLength": low, "maxLength": low + n}, st.integers(0, 5),
              st.integers(0, 5)),
    st.builds(lambda pattern: {"type": "string", "pattern": pattern},
              # Python counts the control characters 1c to 1f as spaces, which neither Rust nor ECMAScript does.
              st.sampled_from([r"^[a-c]+$", r"^\d{2,4}$", "x", "^(a|bb)*$", r"^[^\s\x00-\x1f]+@\w+$"])),
    st.builds(lambda name: {"type": "string", "format": name},
              st.sampled_from(["date", "time", "date-time", "uuid", "ipv4", "email"])),
    st.builds(lambda values: {"enum": values},
              st.lists(st.none() | st.booleans() | st.integers(-9, 9) | st.text("aé\"\\ ", max_size=4), min_size=1,
                       max_size=5)),
    st.builds(lambda value: {"const": value}, st.just({"k": [1, None]}) | st.text("ab\n", max_size=3)),
)  # fmt: skip


def _object(properties: dict[str, Any], num_required: int, more: bool) -> dict[str, Any]:
    required = list(properties)[:num_required]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": more}


SCHEMAS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.builds(_object, st.dictionaries(NAMES, inner, max_size=4), st.integers(0, 4), st.booleans()),
        st.builds(lambda items, low, n: {"type": "array", "items": items, "minItems": low, "maxItems": low + n},
                  inner, st.integers(0, 2), st.integers(0, 3)),
        st.builds(lambda first, rest: {"type": "array", "prefixItems": first, "items": rest, "minItems": len(first)},
                  st.lists(inner, min_size=1, max_size=2), inner),
        st.builds(lambda options: {"anyOf": options}, st.lists(inner, min_size=1, max_size=3)),
        st.builds(lambda each: {"$ref": "#/$defs/d", "$defs": {"d": each}}, inner),
    ),
    max_leaves=6,
)  # fmt: skip


@settings(deadline=None)
@given(value=SCHEMAS, seed=st.integers(0, 2**32))
def test_whatever_the_model_does_what_ends_is_valid(forms: Forms, value: dict[str, Any], seed: int) -> None:
    try:
        matcher = forms.matcher(schema(value))
    except GrammarError:
        return  # a clear refusal
    output = forms.walk(matcher, random.Random(seed), MAX_TOKENS)
    assert matcher.error is None, matcher.error
    if matcher.is_complete:
        try:
            jsonschema.validate(json.loads(forms.text(output)), value, jsonschema.Draft202012Validator)
        except RecursionError:  # one of several alternatives is a reference to itself, which the validator never leaves
            reject()


@settings(deadline=None)
@given(seed=st.integers(0, 2**32), pattern=st.from_regex(r"([a-c](\{1,3\}|\+|\?|\*)?|\[\^?[a-c]\]|\(a\|bc\)){1,6}",
                                                         fullmatch=True))  # fmt: skip
def test_whatever_the_model_does_what_ends_matches(forms: Forms, pattern: str, seed: int) -> None:
    matcher = forms.matcher(StructuredOutput(Constraint.REGEX, pattern))
    output = forms.walk(matcher, random.Random(seed), MAX_TOKENS)
    assert matcher.error is None, matcher.error
    if matcher.is_complete:
        assert re.fullmatch(pattern, forms.text(output))


def test_the_walks_do_end(forms: Forms, tmp_path: Path) -> None:
    """Otherwise the two properties above would hold because nothing ends."""
    value = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
    ends = []
    for seed in range(40):
        matcher = forms.matcher(schema(value))
        forms.walk(matcher, random.Random(seed), MAX_TOKENS)
        ends.append(matcher.is_complete)
    assert sum(ends) > 20


class CountingExecutor:
    """Calls that of `forms`, whose rows it notes."""

    def __init__(self, forms: Forms) -> None:
        self.calls: list[list[int]] = []
        self._executor = forms.threads.executor

    def unsafe_compute_mask_ptr(self, rows: Any, *target: int) -> None:
        self.calls.append([row for _, row in rows])
        self._executor.unsafe_compute_mask_ptr(rows, *target)


def test_one_call_without_the_interpreter_lock_finds_masks_that_take_long(forms: Forms) -> None:
    executor = CountingExecutor(forms)
    patterns = ["[ab]c?", "a*", "xyz", "[0-9]{2}"] * 4
    matchers = [forms.matcher(StructuredOutput(Constraint.REGEX, each), may_end=i % 3 > 0)
                for i, each in enumerate(patterns)]  # fmt: skip
    consume(matchers[0], *forms.tokens("ac"))  # complete
    consume(matchers[6], *forms.tokens("xx"))  # does not fit
    masks, expected = np.zeros((2, 16, matchers[0].num_words), dtype=np.uint32)
    for row, each in enumerate(matchers):
        GrammarMatcher.fill_masks([each], expected[row : row + 1])
    for each in matchers:
        each._threads, each._mask_s = MaskThreads(executor, 2), 1e-3
    GrammarMatcher.fill_masks(matchers, masks)
    assert [sorted(call) for call in executor.calls] == [[row for row in range(16) if row not in (0, 6)]]
    assert (masks == expected).all()
    with_eos = np.flatnonzero(masks[:, EOS >> 5] >> (EOS & 31) & 1)
    assert with_eos.tolist() == [0, 1, 5, 6, 13], "of those that run, a* where EOS ends the sequence"


@pytest.mark.parametrize(("seed", "most_looked_up"), [(0, 16), (1, 16), (2, 16), (3, 0), (4, 0)])
def test_masks_that_are_found_ahead_are_those_that_are_found_when_they_are_needed(
    forms: Forms, monkeypatch: pytest.MonkeyPatch, seed: int, most_looked_up: int
) -> None:
    """Whoever pauses, ends, fails, is asked for forced tokens meanwhile, has drafts, or is slow."""
    monkeypatch.setattr(matcher_module, "AHEAD_S", -1.0)
    monkeypatch.setattr(matcher_module, "MAX_LOOKED_UP", most_looked_up)
    generator = random.Random(seed)
    value = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 5}}, "required": ["name"]}
    patterns = [StructuredOutput(Constraint.REGEX, each) for each in ("[ab]{2,9}c?", "a*", "(left|lift)ing{2}")]
    ahead, others = ([forms.matcher(each) for each in (*patterns, schema(value)) * 4] for _ in range(2))
    num_slow = num_drafted = 0
    for step in range(40):
        taking_part = [row for row in range(16) if generator.random() < 0.8]
        if step % 5 == 4:
            for row in taking_part:
                ahead[row]._is_slow = True
            num_slow += len(taking_part) >= 2
        GrammarMatcher.find_ahead([ahead[row] for row in taking_part])
        forced = {row: others[row].forced_tokens for row in taking_part if generator.random() < 0.3}
        for row in forced:
            assert ahead[row].forced_tokens == forced[row]
        sampled = [row for row in taking_part if generator.random() < 0.9]
        rows = [row for row in sampled for _ in range(1 + len(forced.get(row, ())))]  # its forced tokens are drafts
        masks, expected = (np.empty((len(rows), others[0].num_words), dtype=np.uint32) for _ in range(2))
        GrammarMatcher.fill_masks([ahead[row] for row in rows], masks)
        GrammarMatcher.fill_masks([others[row] for row in rows], expected)
        assert (masks == expected).all()
        num_drafted += len(rows) > len(sampled)
        for row, mask in zip(rows, masks, strict=True):
            choices = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")[:300])
            token_id = 7 if generator.random() < 0.02 else int(generator.choice(choices))  # 7 fits nowhere
            for each in (ahead[row], others[row]):
                consume(each, token_id)
            assert ahead[row].is_running == others[row].is_running
            if not others[row].is_running:
                ahead[row], others[row] = (forms.matcher(patterns[row % 3]) for _ in range(2))
    assert num_slow and num_drafted, "many were timed by several threads, and some had forced tokens"


def test_values_that_masks_found_ahead_let_through_are_valid(forms: Forms, monkeypatch: pytest.MonkeyPatch) -> None:
    """`jsonschema` judges the values of sequences that run together, among them some that explode."""
    monkeypatch.setattr(matcher_module, "AHEAD_S", -1.0)
    generator = random.Random(4)
    value = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 9}, "ages": {"type": "array", "items": {"minimum": 3}}},
        "required": ["name"],
        "additionalProperties": False,
    }
    value["properties"]["ages"]["items"]["type"] = "integer"
    late = StructuredOutput(Constraint.GRAMMAR, "start: A B\nA: /[xy]{40}/\nB: /((a{100}){100}){100}/")
    matchers = [forms.matcher(schema(value)) for _ in range(8)] + [forms.matcher(late) for _ in range(3)]
    outputs: list[list[int]] = [[] for _ in matchers]
    masks = np.empty((len(matchers), matchers[0].num_words), dtype=np.uint32)
    for _ in range(400):
        running = [row for row, each in enumerate(matchers) if each.is_running]
        if not running:
            break
        GrammarMatcher.find_ahead([matchers[row] for row in running])
        GrammarMatcher.fill_masks([matchers[row] for row in running], masks[: len(running)])
        sampled = []
        for row, mask in zip(running, masks, strict=False):
            choices = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")[:300]).tolist()
            closing = [each for each in choices if each == EOS or chr(each & 127) in '"]}']
            outputs[row].append(generator.choice(closing if closing and generator.random() < 0.3 else choices))
            sampled.append((matchers[row], outputs[row][-1]))
        GrammarMatcher.consume(sampled)
    for each, output in zip(matchers[:8], outputs, strict=False):
        assert each.error is None
        jsonschema.validate(json.loads(forms.text(output)), value)
    assert all(each.error is not None for each in matchers[8:])


def test_masks_are_begun_before_the_caller_goes_on(forms: Forms, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if it keeps the interpreter lock."""
    monkeypatch.setattr(matcher_module, "AHEAD_S", -1.0)
    monkeypatch.setattr(matcher_module, "HANDOVER_S", 60.0)
    find_masks, begun = matcher_module._find_masks, list[bool]()

    def find(*arguments: Any, **options: Any) -> None:
        begun.append(True)
        find_masks(*arguments, **options)

    matchers = [forms.matcher(SPELLED) for _ in range(2)]
    forms.threads.ahead.submit(int).result()  # its thread runs
    monkeypatch.setattr(matcher_module, "_find_masks", find)
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(60.0)
    try:
        GrammarMatcher.find_ahead(matchers)
        assert begun
    finally:
        sys.setswitchinterval(interval_s)


def test_a_matcher_says_whether_another_thread_still_finds_its_mask(
    forms: Forms, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(matcher_module, "AHEAD_S", -1.0)
    find_masks, may_find = matcher_module._find_masks, threading.Event()

    def find(*arguments: Any, **options: Any) -> None:
        assert may_find.wait(60.0)
        find_masks(*arguments, **options)

    monkeypatch.setattr(matcher_module, "_find_masks", find)
    matchers = [forms.matcher(SPELLED) for _ in range(3)]
    GrammarMatcher.find_ahead(matchers[:2])
    found = [each.has_found for each in matchers]
    may_find.set()
    assert found == [False, False, True]
    assert np.array_equal(allowed(matchers[0]), allowed(matchers[2]))
    assert matchers[1].has_found


def test_masks_found_ahead_keep_no_matcher_in_memory(forms: Forms, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever pauses would keep the lexers of all that have ended."""
    monkeypatch.setattr(matcher_module, "AHEAD_S", -1.0)
    matchers = [forms.matcher(SPELLED) for _ in range(3)]
    GrammarMatcher.find_ahead(matchers)
    forms.threads.ahead.submit(int).result()  # its thread has forgotten them
    ended = weakref.ref(matchers.pop())
    assert ended() is None


@pytest.mark.parametrize("is_restored", [False, True])
def test_a_mask_that_no_step_has_used_is_forgotten_with_the_next_token(
    forms: Forms, monkeypatch: pytest.MonkeyPatch, is_restored: bool
) -> None:
    monkeypatch.setattr(matcher_module, "AHEAD_S", -1.0)
    a, b, _ = forms.tokens("abc")
    matchers = [forms.matcher(SPELLED) for _ in range(2)]
    GrammarMatcher.find_ahead(matchers)
    for each in matchers:
        if is_restored:
            each.sync([a])
        else:
            consume(each, a)
        assert set(np.flatnonzero(allowed(each))) == {b}


def test_threads_find_masks_only_if_those_of_the_step_before_took_long(
    forms: Forms, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clocks take the place of the masks' times, for 2 matchers in 7 steps."""
    # Of each matcher; None: threads find the masks, in 2.0 ms, in 0.8 ms, and in 6.1 ms, which is too long.
    cpu_ms, wall_ms = [[0.4, 0.5], [1.5, 1.0], None, None, [0.5, 3.0], None, [0.1, 0.1]], [2.0, 0.8, 6.1, 0.1]
    cpu = itertools.chain.from_iterable((0.0, 1e-3 * each) for step in cpu_ms for each in step or [])
    wall = itertools.chain.from_iterable((0.0, 1e-3 * each) for each in wall_ms)
    clocks = SimpleNamespace(thread_time=lambda: next(cpu), monotonic=lambda: next(wall))
    executor, matchers = CountingExecutor(forms), [forms.matcher(SPELLED) for _ in range(2)]
    for each in matchers:
        each._threads, each._start = MaskThreads(executor, 2), matchers[0]._start  # one thread times those of a lexer
    monkeypatch.setattr(matcher_module, "time", clocks)
    masks, num_calls = np.zeros((2, matchers[0].num_words), dtype=np.uint32), []
    for _ in range(7):
        GrammarMatcher.fill_masks(matchers, masks)
        num_calls.append(len(executor.calls))
    assert num_calls == [0, 0, 1, 2, 2, 3, 3]


@pytest.mark.parametrize("is_timed", [False, True])
def test_masks_found_side_by_side_count_for_as_long_as_a_step_waits_for_them(
    forms: Forms, monkeypatch: pytest.MonkeyPatch, is_timed: bool
) -> None:
    """A clock takes the place of time: all take 3 ms, each at least 1.2 ms of a thread."""
    matchers = [forms.matcher(SPELLED) for _ in range(8)]
    for each in matchers:
        each._mask_s, each._is_slow = 1e-3, is_timed
    clocks = SimpleNamespace(
        thread_time=itertools.count(0.0, 1.2e-3).__next__, monotonic=itertools.count(0.0, 3e-3).__next__
    )
    monkeypatch.setattr(matcher_module, "time", clocks)
    GrammarMatcher.fill_masks(matchers, np.zeros((8, matchers[0].num_words), dtype=np.uint32))
    assert sum(each.step_s for each in matchers) == pytest.approx(3e-3)


def test_threads_find_the_masks_that_are_left_where_one_takes_longer_than_before(
    forms: Forms, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A clock takes the place of the masks' times: 1.2 ms each, after masks that took nothing."""
    executor, matchers = CountingExecutor(forms), [forms.matcher(SPELLED) for _ in range(5)]
    for each in matchers:
        each._threads = MaskThreads(executor, 2)
    expected = allowed(matchers[0])
    clocks = SimpleNamespace(thread_time=itertools.count(0.0, 1.2e-3).__next__, monotonic=lambda: 0.0)
    monkeypatch.setattr(matcher_module, "time", clocks)
    masks = np.zeros((5, matchers[0].num_words), dtype=np.uint32)
    GrammarMatcher.fill_masks(matchers, masks)
    assert [sorted(call) for call in executor.calls] == [[2, 3, 4]]
    assert (np.unpackbits(masks.view(np.uint8), axis=1, bitorder="little")[:, :300] == expected).all()


def test_a_form_whose_tokens_take_too_long_to_follow_ends_alone(forms: Forms, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clocks take the place of time: the first matcher needs 0.2 s for each token, the others nothing."""
    matchers = [forms.matcher(StructuredOutput(Constraint.REGEX, "a*")) for _ in range(12)]
    masks = np.zeros((12, matchers[0].num_words), dtype=np.uint32)
    cpu = itertools.cycle([0.0, 0.2] + [0.0] * 24)  # of all tokens, and of each mask
    wall = itertools.cycle([0.0] + [0.4] * 12)  # before the first token, and after each
    clocks = SimpleNamespace(thread_time=lambda: next(cpu), perf_counter=lambda: next(wall), monotonic=lambda: 0.0)
    monkeypatch.setattr(matcher_module, "time", clocks)
    for _ in range(2):
        assert matchers[0].error is None
        GrammarMatcher.consume([(each, forms.tokens("a")[0]) for each in matchers])
        GrammarMatcher.fill_masks(matchers, masks)
    assert matchers[0].error is not None and "at most 5 ms" in matchers[0].error
    assert all(each.is_running for each in matchers[1:])


def test_it_knows_what_its_last_step_took(forms: Forms, monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock takes the place of time: 3 ms for its mask, 2 for its token."""
    matcher = forms.matcher(StructuredOutput(Constraint.REGEX, "a*"))
    assert matcher.step_s == 0.0
    matcher.warm_up()
    assert matcher.step_s > 0.0, "before the first step, by what was found ahead"
    times = itertools.cycle([0.0, 3e-3, 0.0, 2e-3])
    clocks = SimpleNamespace(thread_time=lambda: next(times), perf_counter=itertools.count().__next__)
    monkeypatch.setattr(matcher_module, "time", clocks)
    GrammarMatcher.fill_masks([matcher], np.zeros((1, matcher.num_words), dtype=np.uint32))
    matcher._forced_s = 0.0
    GrammarMatcher.consume([(matcher, forms.tokens("a")[0])])
    assert matcher.step_s == pytest.approx(5e-3)


def test_a_form_that_takes_too_long_for_its_tokens_ends_alone(forms: Forms, monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock takes the place of a mask's time: 0.1 s for the masks of one matcher, nothing for the other's."""
    slow, fast = forms.matcher(StructuredOutput(Constraint.REGEX, "a*")), forms.matcher(SPELLED)
    times = itertools.chain.from_iterable(([i * 0.1, i * 0.1 + 0.1, 9.0, 9.0]) for i in range(100))
    clocks = SimpleNamespace(thread_time=lambda: next(times), monotonic=lambda: 0.0)
    monkeypatch.setattr(matcher_module, "time", clocks)
    masks = np.zeros((2, slow.num_words), dtype=np.uint32)
    for _ in range(3):
        assert slow.error is None
        GrammarMatcher.fill_masks([slow, fast], masks)
    assert slow.error is not None
    assert "100 ms" in slow.error and "at most 5 ms" in slow.error
    assert fast.error is None and fast.is_running
