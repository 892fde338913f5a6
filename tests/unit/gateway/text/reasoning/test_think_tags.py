"""Reasoning and content of a text, against a regular expression, however the text is divided."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.gateway.text.deltas import ContentDelta, ReasoningDelta
from services.gateway.text.reasoning.formats import FORMATS, choose_reasoning_format
from services.gateway.text.reasoning.think_tags import Beginning, ThinkTags
from tests.support.examples import examples

PIECES = st.lists(st.sampled_from(["<think>", "</think>", "<", "</", "think>", "a", " ", "\n", "é"]), max_size=15)


def parse(beginning: Beginning, text: str, cuts: Sequence[int]) -> tuple[str, str]:
    """Reasoning and content of a text that arrives in pieces of the given sizes."""
    parser, deltas, start = ThinkTags(beginning), [], 0
    for size in [*cuts, len(text) + 1]:
        deltas += parser.feed(text[start : start + size])
        start += size
    deltas += parser.finish()
    kinds = [type(each) for each in deltas]
    assert kinds == sorted(kinds, key=[ReasoningDelta, ContentDelta].index), "reasoning comes first"
    reasoning = "".join(each.text for each in deltas if isinstance(each, ReasoningDelta))
    return reasoning, "".join(each.text for each in deltas if isinstance(each, ContentDelta))


def truth(beginning: Beginning, text: str) -> tuple[str, str]:
    """The same of a whole text."""
    begins = re.match(r"(\s*<think>)+", text)
    if beginning is Beginning.CONTENT or (beginning is Beginning.EITHER and not begins):
        return "", text
    inner = text[begins.end() :] if begins else text
    reasoning, marker, content = inner.partition("</think>")
    return reasoning.strip(), content.lstrip("\n") if marker else ""


@settings(max_examples=examples(500))
@given(pieces=PIECES, beginning=st.sampled_from(Beginning), cuts=st.lists(st.integers(1, 9), max_size=20))
def test_reasoning_and_content_are_told_apart(pieces: list[str], beginning: Beginning, cuts: list[int]) -> None:
    text = "".join(pieces)
    assert parse(beginning, text, cuts) == truth(beginning, text)


@pytest.mark.parametrize(
    ("prompt_end", "open_message", "expected"),
    [
        ("assistant\n", None, Beginning.EITHER),
        ("assistant\n<think>\n", None, Beginning.REASONING),
        ("assistant\n<think>\n\n</think>\n\n", None, Beginning.CONTENT),
        ("what is <think>?<|im_end|>\n<|im_start|>assistant\n", None, Beginning.EITHER),
        ("", "<think>Let me", Beginning.REASONING),
        ("", "<think>a</think>The", Beginning.CONTENT),
        ("", "The capital", Beginning.CONTENT),
    ],
)
def test_the_prompt_decides_what_comes_first(prompt_end: str, open_message: str | None, expected: Beginning) -> None:
    assert FORMATS["qwen3"].beginning(prompt_end, open_message) is expected
    always = FORMATS["deepseek_r1"].beginning(prompt_end, open_message)
    assert always is (Beginning.REASONING if expected is Beginning.EITHER else expected)


def test_templates_choose_the_format() -> None:
    assert choose_reasoning_format("auto", "{{ '<think>' }}{{ '</think>' }}") is FORMATS["qwen3"]
    assert choose_reasoning_format("auto", "<｜Assistant｜>{{ x.split('</think>') }}") is FORMATS["deepseek_r1"]
    assert choose_reasoning_format("auto", "plain") is None
    assert choose_reasoning_format("none", "</think>") is None
