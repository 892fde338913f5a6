"""The parsers of calls: any division of a text gives the same, which is what the format's description says."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.gateway.text.answer_parts import AnswerParts, ToolCall
from services.gateway.text.deltas import CallBegin, CallEnd, Delta
from services.gateway.text.tools.formats import FORMATS
from services.gateway.text.tools.tool import Tool, read_tools

PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "where": {"type": "object"}},
}
DEFINITIONS = [
    {"type": "function", "function": {"name": name, "parameters": PARAMETERS}} for name in ("get_weather", "f", "a-b_1")
]
TOOLS: Sequence[Tool] = read_tools(json.dumps(DEFINITIONS), "", True).tools
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
ARGUMENTS = st.dictionaries(st.text(max_size=8), JSON_VALUES, max_size=3)
CALLS = st.lists(st.tuples(st.sampled_from([tool.name for tool in TOOLS]), ARGUMENTS), min_size=1, max_size=3)
CUTS = st.lists(st.integers(1, 12), min_size=1, max_size=20)


def parse(format_name: str, text: str, sizes: Sequence[int]) -> list[Delta]:
    """The deltas of a text that arrives in pieces of the given sizes, again and again."""
    parser, deltas, start, turn = FORMATS[format_name].make_parser(TOOLS), [], 0, 0
    while start < len(text):
        size = sizes[turn % len(sizes)]
        deltas += parser.feed(text[start : start + size])
        start, turn = start + size, turn + 1
    return deltas + parser.finish()


def joined(deltas: Sequence[Delta]) -> list[Any]:
    """The parts of an answer, without the calls' random ids."""
    parts = AnswerParts()
    parts.add(deltas)
    return [(each.name, each.arguments) if isinstance(each, ToolCall) else each.text for each in parts.finish()]


def streamed(deltas: Sequence[Delta]) -> list[Any]:
    """What a client of the stream puts together; malformed calls included."""
    parts = AnswerParts()
    parts.add([CallEnd(each.index) if isinstance(each, CallEnd) else each for each in deltas])
    return [(each.name, each.arguments) if isinstance(each, ToolCall) else each.text for each in parts.finish()]


@given(
    calls=CALLS,
    before=st.text("ab <{[\n", max_size=12),
    after=st.text("ab {\n", max_size=6),
    cuts=CUTS,
    is_ascii=st.booleans(),
)
def test_hermes(
    calls: list[tuple[str, Any]], before: str, after: str, cuts: list[int], is_ascii: bool
) -> None:
    """Against the regular expression with which the format's authors read it."""
    text = before + "\n".join(
        f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments}, ensure_ascii=is_ascii)}\n</tool_call>"
        for name, arguments in calls
    ) + after
    found = [json.loads(each) for each in re.findall(r"<tool_call>\n(.*?)\n</tool_call>", text, re.DOTALL)]
    if any("tool_call" in json.dumps(each[1]) for each in calls):
        return  # the regular expression is no truth then
    parts = joined(parse("hermes", text, cuts))
    read = [{"name": each[0], "arguments": json.loads(each[1])} for each in parts if isinstance(each, tuple)]
    assert read == found
    content = "".join(each for each in parts if isinstance(each, str))
    assert re.sub(r"\s", "", content) == re.sub(r"\s", "", before + after)


MARKUP = {
    "hermes": ["<tool_call>", "</tool_call>", '{"name": "f", "arguments": ', '{"name": "f"', "}", "{", '"a": ', '"x"'],
}
WRONG = [
    ",", "\n", " ", "1", "[", "]", "true", "nul", "\\", "\\u12", '"', "<", "tool", "é", "\u2028", "\x00", "()", "=",
]


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=300)
@given(data=st.data(), cuts=CUTS)
def test_any_text_gives_the_same_however_it_is_divided(name: str, data: st.DataObject, cuts: list[int]) -> None:
    pieces = data.draw(st.lists(st.sampled_from(MARKUP[name] + WRONG), max_size=25))
    text = "".join(pieces)
    whole, divided = parse(name, text, [len(text) + 1]), parse(name, text, cuts)
    assert joined(divided) == joined(whole)
    assert streamed(divided) == streamed(whole)
    open_calls = [each.index for each in whole if isinstance(each, CallBegin)]
    assert open_calls == list(range(len(open_calls))) == [each.index for each in whole if isinstance(each, CallEnd)]
    for part in joined(whole):
        if isinstance(part, tuple):
            assert isinstance(json.loads(part[1]), dict), "a call that is not malformed has an object"
