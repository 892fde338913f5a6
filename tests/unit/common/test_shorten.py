"""How much of a client's text appears in logs and errors."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from services.common.shorten import quote, shorten, show


@given(st.text(), st.integers(1, 50))
def test_long_text_is_cut_with_an_ellipsis(text: str, most: int) -> None:
    shown = shorten(text, most)
    assert len(shown) <= most
    assert shown == text if len(text) <= most else shown == text[: most - 1] + "…"


def test_long_text_is_quoted_in_one_line() -> None:
    assert quote("gpt-4") == "'gpt-4'"
    assert quote("\n" * 2_000_000) == "'" + "\\n" * 99 + "…'"


def test_values_of_json_have_its_words() -> None:
    assert show(json.loads('{"a": [true, null], "b": "True"}')) == '{"a": [true, null], "b": "True"}'
    assert show(False) == "false"
    assert show([[["x"] * 3] * 3] * 100) == json.dumps([[["x"] * 3] * 3] * 100)[:99] + "…"
    assert show("a text alone") == "'a text alone'"
    assert show(['a "quoted" Łódź', "\x1b[31m"]) == r'["a \"quoted\" Łódź", "\u001b[31m"]'
    assert show([{"k" * 150: 1}, 2])[:3] == '[{"' and len(show([{"k" * 150: 1}])) <= 100


def test_only_the_first_of_many_nested_values_are_looked_at() -> None:
    num_shown = 0

    class Counted:
        def __repr__(self) -> str:
            nonlocal num_shown
            num_shown += 1
            return "1"

    value: object = Counted()
    for _ in range(6):
        value = [value] * 30
    assert len(show(value)) <= 100 and show([value] * 2)
    assert num_shown <= 2 * 20**3
