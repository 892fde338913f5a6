"""Expressions that end a text, compared with `re.search` in the text so far, behind each of its tokens."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.common.errors import InvalidRequest
from services.gateway.text import stop_patterns
from services.gateway.text.stop_patterns import MAX_MOVES, MAX_STATES, StopPatterns, automaton_of, make_stops
from services.gateway.text.stop_strings import StopStrings

PIECES = st.lists(st.text("abA _\nß1", min_size=1, max_size=4), max_size=12)
CHARACTERS = ["a", "b", "A", " ", r"\n", ".", r"\w", r"\W", r"\d", r"\s", "[ab]", "[^a]", "[A-Z1]", r"[^\s_]", "ß"]
PLACES = ["^", "$", r"\b", r"\B", r"\A", r"\Z"]
EXPRESSIONS = st.recursive(
    st.sampled_from(CHARACTERS + PLACES),
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=3).map("".join),
        st.tuples(inner, inner).map(lambda each: f"(?:{each[0]}|{each[1]})"),
        st.tuples(inner, st.sampled_from(["*", "+", "?", "*?", "+?", "{2}", "{0,2}", "{1,}", "{,3}?"])).map(
            lambda each: f"({each[0]}){each[1]}"
        ),
        st.tuples(st.sampled_from(["i", "m", "s", "a", "im"]), inner).map(lambda each: f"(?{each[0]}:{each[1]})"),
    ),
    max_leaves=6,
)


def search(patterns: list[str], pieces: list[str]) -> tuple[int, set[str]] | None:
    """The first piece behind which an expression matches, and all that do."""
    for count in range(1, len(pieces) + 1):
        text = "".join(pieces[:count])
        if found := {pattern for pattern in patterns if re.search(pattern, text)}:
            return count, found
    return None


def feed(stops: StopPatterns, pieces: list[str]) -> tuple[int, str, str] | None:
    """Number of pieces that were taken, their text, and what ended it."""
    text = ""
    for count, piece in enumerate(pieces, start=1):
        shown, found = stops.feed(piece)
        text += shown
        if found is not None:
            assert stops.feed("more") == ("", found)
            return count, text, found
    return None


@settings(deadline=None, max_examples=400)
@given(patterns=st.lists(EXPRESSIONS, min_size=1, max_size=2), pieces=PIECES)
def test_a_text_ends_with_the_token_behind_which_a_search_finds_a_match(patterns: list[str], pieces: list[str]) -> None:
    try:
        for pattern in patterns:
            re.compile(pattern)
    except re.error:
        return  # such as a flag in the middle
    expected, ended = search(patterns, pieces), feed(StopPatterns(patterns), pieces)
    if expected is None or ended is None:
        assert ended is expected
        return
    count, found = expected
    assert ended[:2] == (count, "".join(pieces[:count])) and ended[2] in found


@pytest.mark.parametrize("flags", ["i", "ai"])
@pytest.mark.parametrize(
    ("one", "other"), [("s", "ſ"), ("ſ", "s"), ("μ", "µ"), ("ς", "σ"), ("k", "\u212a"), ("[^s]", "ſ"), ("[à-ÿ]", "Ÿ")]
)
def test_case_is_ignored_as_by_re(flags: str, one: str, other: str) -> None:
    pattern = f"(?{flags}){one}"
    assert (feed(StopPatterns([pattern]), [other]) is None) == (re.search(pattern, other) is None)


def test_moves_that_were_forgotten_are_found_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stop_patterns, "MAX_MOVES", 1)
    assert feed(StopPatterns(["(a|b)*a(a|b){3}c"]), list("abbabaabbac")) == (11, "abbabaabbac", "(a|b)*a(a|b){3}c")


def test_only_so_many_moves_are_remembered() -> None:
    stops = StopPatterns(["x.y"])
    for code in range(0x4E00, 0x4E00 + 2 * MAX_MOVES):
        stops.feed(chr(code))
    assert len(automaton_of(("x.y",)).moves) <= MAX_MOVES


def test_a_stop_string_ends_the_text_before_it_and_what_it_held_back_is_shown_with_a_match() -> None:
    stops = make_stops(["END"], [r"\d"], include_in_output=False)
    assert isinstance(stops, StopPatterns)
    assert feed(stops, ["a", "EN", "D1"]) == (3, "a", "END")
    stops = make_stops(["END"], [r"\d"], include_in_output=False)
    assert isinstance(stops, StopPatterns)
    assert feed(stops, ["a", "E", "N1"]) == (3, "aEN1", r"\d")


def test_nothing_is_paid_without_expressions() -> None:
    assert make_stops([], [], include_in_output=False) is None
    assert type(make_stops(["a"], [], include_in_output=False)) is StopStrings


@pytest.mark.parametrize(
    ("pattern", "said"),
    [
        ("(", "missing )"),
        (r"(a)\1", "groupref is not supported"),
        ("a(?=b)", "assert is not supported"),
        ("(?>a)b", "atomic group is not supported"),
        ("a{257}", "256 characters"),
        ("((a{20}){20}){20}", "256 characters"),
        ("a{1,1000000000}", "256 characters"),
        ("(a|){1000000000}", "256 characters"),
        ("(?:" + "|" * 240 + "){200}", "1024 alternatives"),
        ("a{99999999999999999999}", "repeats too often"),
        ("(" * 5000 + ")" * 5000, "nested too deep"),
    ],
)
def test_what_cannot_be_used_is_refused_with_its_reason(pattern: str, said: str) -> None:
    with pytest.raises(InvalidRequest, match=re.escape(said)) as error:
        StopPatterns([pattern])
    assert error.value.param == "stop_regex"


def test_a_repeated_set_is_asked_once_for_each_character(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def make(kind: Any, value: Any, flags: int) -> Callable[[str], bool]:
        test = original(kind, value, flags)
        return lambda character: asked.append(character) or test(character)  # type: ignore[func-returns-value]

    original = stop_patterns._character
    monkeypatch.setattr(stop_patterns, "_character", make)
    assert feed(StopPatterns(["[x-z]{200}(?i:[x-z])"]), ["y"] * 200 + ["Z"]) is not None
    assert asked == ["y", "y", "Z", "Z"]  # without and with the flag


def test_nested_loops_reach_each_other() -> None:
    pattern = r"\A" + "(?:" * 40 + "a" + "b?)*" * 40 + "c"
    for text, is_match in (("c", True), ("aabc", True), ("a" + "b" * 40 + "c", True), ("abdc", False)):
        assert (feed(StopPatterns([pattern]), [text]) is not None) == is_match


def test_an_empty_group_may_be_repeated_often() -> None:
    pattern = "((){1000000000}){1000000000}b"
    assert feed(StopPatterns([pattern]), ["a", "b"]) == (2, "ab", pattern)


def test_the_limit_holds_for_all_expressions_together() -> None:
    StopPatterns(["a{127}", "b{127}"])
    with pytest.raises(InvalidRequest, match="256"):
        StopPatterns(["a{127}", "b{128}"])


def test_nesting_makes_the_work_for_an_expression_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The event loop does it. Sets of states were joined until none grew, 25,600 times for this one."""
    num_joined = 0

    def reduce(*arguments: Any) -> Any:
        nonlocal num_joined
        num_joined += 1
        return functools.reduce(*arguments)

    monkeypatch.setattr(stop_patterns, "functools", SimpleNamespace(reduce=reduce))
    nested = StopPatterns(["(a|" * 80 + "b" + ")*" * 80 + "c"])
    assert num_joined <= MAX_STATES + 1
    assert nested.feed("xabac") == ("xabac", "(a|" * 80 + "b" + ")*" * 80 + "c")
