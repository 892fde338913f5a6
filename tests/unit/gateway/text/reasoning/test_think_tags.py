"""Reasoning and content of a text, against a regular expression, however the text is divided."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.gateway.text.answer_parts import AnswerParts, ReasoningPart, TextPart, ToolCall
from services.gateway.text.deltas import ContentDelta, ReasoningDelta
from services.gateway.text.parsing import Parsing
from services.gateway.text.reasoning.formats import FORMATS, choose_reasoning_format
from services.gateway.text.reasoning.think_tags import MAX_HELD_CHARACTERS, Beginning, ThinkTags
from services.gateway.text.tools.formats import FORMATS as CALLS
from services.gateway.text.tools.tool import Tools, read_tools
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


TOOLS = read_tools('[{"type": "function", "function": {"name": "f"}}]', "", True)
STRICT = read_tools('[{"type": "function", "function": {"name": "f", "strict": true}}]', "", True)
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'


def read(text: str, cuts: Sequence[int], *, is_cut: bool = False, tools: Tools = TOOLS) -> tuple[list[Any], int]:
    """The parts of an answer that begins with reasoning, and the number of its tokens that are reasoning."""
    parser, parts, start = Parsing(CALLS["hermes"], tools, Beginning.REASONING).make_parser(), AnswerParts(), 0
    for size in [*cuts, *[1] * (len(text) - sum(cuts))]:
        parts.add(parser.feed_token(text[start : start + size], None))
        start += size
    parts.add(parser.finish("", is_cut))
    found = [each.arguments if isinstance(each, ToolCall) else each for each in parts.finish()]
    return found, parser.num_reasoning_tokens


@given(cuts=st.lists(st.integers(1, 9), max_size=9))
def test_a_call_of_an_answer_that_never_ends_its_reasoning_is_a_call(cuts: list[int]) -> None:
    parts, num_tokens = read(f"Well.\n\n{CALL}", cuts)
    assert parts == [ReasoningPart("Well."), '{"a": 1}']
    if not cuts:
        assert num_tokens == len("Well.\n\n") + len("<tool_call>") - 1, "the marker is held with its last character"


@given(cuts=st.lists(st.integers(1, 9), max_size=9))
def test_a_call_before_the_end_of_the_reasoning_is_reasoning(cuts: list[int]) -> None:
    text = f"I could {CALL}, or not.</think>\n\nNo."
    assert read(text, cuts)[0] == [
        ReasoningPart(f"I could {CALL}, or not."), TextPart("No."),
    ]  # fmt: skip


def test_a_call_within_reasoning_that_a_limit_cuts_off_or_a_grammar_does_not_know_is_reasoning() -> None:
    expected = [ReasoningPart(f"Well.\n\n{CALL}")]
    assert read(f"Well.\n\n{CALL}", [], is_cut=True)[0] == expected
    assert read(f"Well.\n\n{CALL}", [], tools=STRICT)[0] == expected


def test_reasoning_behind_the_marker_of_a_call_is_not_held_back_for_ever() -> None:
    text = "<tool_call>" + "a" * MAX_HELD_CHARACTERS
    assert "".join(each.text for each in ThinkTags(Beginning.REASONING, "<tool_call>").feed(text)) == text


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
