"""Grammars with a rule of which no text ends are refused; recursion that can end is not, nor what cannot be read."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.common.structured_output import Constraint, StructuredOutput
from services.grammar.endless_grammar import check_ends
from services.grammar.grammar_error import GrammarError
from services.grammar.lower import lower
from tests.support.examples import examples

ENDLESS = [
    'start: "a" start',
    'start: ("a" | "b") x\nx: /[a-c]/ start | (x) "c"',
    'root ::= "a" root | "b" root',
    'root ::= [a-z]+ x\nx ::= (root | x) "."',
    'start: x+\nx: "a" x~2..3\n  | x{1,2} "b"',
    'start: A start // no end | "b"\nA: "a"',
    'start: %json {"type": "null", "x": "|"} start',
    'start: "a" | x\nx: "b" x',
    'start: x{0,3} "a" start~0..2\nx: "b" x',
    'start: "a" y?\ny: "c" | "d" [x]\nx: ("b" x)',
    'start: "a" ["b" [x | "c"]]?\nx: x "b"',
    'root ::= "a" (x* "b")? \nx ::= [0-9] x',
]
ENDING = [
    'start: "a" start | "b"',
    'start: "a" start?',
    'start: "a" [start]',
    'start: "(" start* ")"',
    'start: x{0,3} "a" start~0..2 | "c"\nx: "b" x | "d"',
    'root ::= "a" root | ""',
    'root ::= x\nx ::= "(" x ")" | [0-9]+',
    'start: "a" | "c"\nunused: "b" unused',
    'start: expr\nexpr: NUMBER | expr ("+" | "-") expr | "(" expr ")"\nNUMBER: /[0-9]+/',
    'start: "a".."z" x\nx: <[5]> | <|x|> | /a\\/|"/ | "\\"|" x',
    '%llguidance {}\nstart: "a"\n%ignore / +/',
    'start: %json {"type": "null"} | start "a"',
    "start: missing start | A",
    'start: %json {"type": "null"} | start "a" | "b" missing?',
    "",
    ":",
    "?",
    "start: ()",
    "start: (((",
    "start: ) x",
    "start: \\",
    'start: "a" @other start',
    "start: " + "(" * 5_000 + '"a"' + ")" * 5_000,
]


@pytest.mark.parametrize("text", ENDLESS)
def test_a_grammar_with_a_rule_without_an_end_is_refused(text: str) -> None:
    with pytest.raises(GrammarError, match=r"^only an endless text has this form: no text of the rule .* ends$"):
        lower(StructuredOutput(Constraint.GRAMMAR, text))


@pytest.mark.parametrize("text", ENDING)
def test_recursion_that_can_end_and_what_cannot_be_read_is_left_to_the_compiler(text: str) -> None:
    try:
        lower(StructuredOutput(Constraint.GRAMMAR, text))
    except GrammarError as error:
        assert "endless" not in str(error)


NAMES = ("start", "x", "y")
ATOMS: Any = st.sampled_from([*NAMES, '"a"', "A"])
BODIES = st.recursive(
    st.lists(ATOMS, min_size=1, max_size=3).map(lambda parts: ("all", parts)),
    lambda inner: st.one_of(
        st.tuples(st.just("any"), st.lists(inner, min_size=1, max_size=2)),
        st.tuples(st.sampled_from(["?", "*", "+", "{2,3}", "{0,1}"]), inner),
        st.tuples(st.just("all"), st.lists(inner | ATOMS, min_size=1, max_size=2)),
    ),
    max_leaves=4,
)


def write(body: Any) -> str:
    if isinstance(body, str):
        return body
    kind, inner = body
    if kind in ("all", "any"):
        return "(" + (" " if kind == "all" else " | ").join(map(write, inner)) + ")"
    return f"({write(inner)}){kind}"


def names_in(body: Any) -> set[str]:
    if isinstance(body, str):
        return {body}
    _, inner = body
    parts = [inner] if isinstance(inner, str | tuple) else inner
    return set[str]().union(*map(names_in, parts))


def reached(rules: dict[str, Any]) -> set[str]:
    found = {"start"}
    while more := {name for each in found for name in names_in(rules[each]) if name in rules} - found:
        found |= more
    return found


def derives(body: Any, rules: dict[str, Any], depth: int) -> bool:
    """Whether some text is derived within so many rules, by trying."""
    if isinstance(body, str):
        return body not in rules or (depth > 0 and derives(rules[body], rules, depth - 1))
    kind, inner = body
    if kind in ("all", "any"):
        return (all if kind == "all" else any)(derives(each, rules, depth) for each in inner)
    return kind in ("?", "*", "{0,1}") or derives(inner, rules, depth)


@settings(deadline=None, max_examples=examples(80))
@given(bodies=st.tuples(BODIES, BODIES, BODIES), seed=st.integers(0, 2**32))
def test_exactly_the_grammars_with_a_rule_without_a_text_are_refused(bodies: tuple[Any, ...], seed: int) -> None:
    rules = dict(zip(NAMES, bodies, strict=True))
    lines = [f"{name}: {write(body)}" for name, body in rules.items()] + ['A: "b"']
    random.Random(seed).shuffle(lines)
    all_end = all(derives(name, rules, len(rules) + 1) for name in reached(rules))
    try:
        check_ends("\n".join(lines))
    except GrammarError:
        assert not all_end, lines
    else:
        assert all_end, lines
