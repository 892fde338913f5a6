"""The parsers of calls: any division of a text gives the same, which is what the format's description says."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic_core import from_json

from services.gateway.text.answer_parts import AnswerParts, ToolCall
from services.gateway.text.deltas import CallBegin, CallEnd, Delta
from services.gateway.text.tools.formats import FORMATS
from services.gateway.text.tools.tool import Tool, read_tools
from tests.support.examples import examples

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


def parse(format_name: str, text: str, sizes: Sequence[int], is_cut: bool = False) -> list[Delta]:
    """The deltas of a text that arrives in pieces of the given sizes, again and again."""
    parser, deltas, start, turn = FORMATS[format_name].make_parser(TOOLS), [], 0, 0
    while start < len(text):
        size = sizes[turn % len(sizes)]
        deltas += parser.feed(text[start : start + size])
        start, turn = start + size, turn + 1
    return deltas + parser.finish(is_cut)


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


def without_markers(calls: list[tuple[str, Any]], *markers: str) -> bool:
    """Whether no argument has a marker of the format, which would end it too early."""
    return not any(marker in json.dumps(call[1], ensure_ascii=False) for call in calls for marker in markers)


@given(calls=CALLS, before=st.text("ab {[\n", max_size=12), cuts=CUTS)
def test_mistral_as_a_list(calls: list[tuple[str, Any]], before: str, cuts: list[int]) -> None:
    items = json.dumps([{"name": name, "arguments": each, "id": "abcdefghi"} for name, each in calls])
    truth = [(each["name"], each["arguments"]) for each in json.loads(items)]
    assert read(parse("mistral", f"{before}[TOOL_CALLS] {items}", cuts)) == (before.strip(), truth)


@given(calls=CALLS, separator=st.sampled_from(["[ARGS]", "[CALL_ID]abcdefghi[ARGS]", ""]), cuts=CUTS)
def test_mistral_by_name(calls: list[tuple[str, Any]], separator: str, cuts: list[int]) -> None:
    if without_markers(calls, "[TOOL_CALLS]"):
        text = "Yes." + "".join(f"[TOOL_CALLS]{name}{separator}{json.dumps(each)}" for name, each in calls)
        assert read(parse("mistral", text, cuts)) == ("Yes.", calls)


@given(
    calls=CALLS,
    tag=st.sampled_from(["", "<|python_tag|>", "I look:\n"]),
    keys=st.sampled_from([("name", "parameters"), ("name", "arguments"), ("function", "parameters")]),
    cuts=CUTS,
)
def test_llama3_json(calls: list[tuple[str, Any]], tag: str, keys: tuple[str, str], cuts: list[int]) -> None:
    kind = {"type": "function"} if keys[0] == "function" else {}
    objects = [{**kind, keys[0]: name, keys[1]: arguments} for name, arguments in calls]
    text = tag + "; ".join(map(json.dumps, objects))
    expected = "I look:" if "look" in tag else ""
    assert read(parse("llama3_json", text, cuts)) == (expected, calls)


IDENTIFIERS = st.sampled_from(["city", "days", "x_1", "größe"])
PYTHON_CALLS = st.lists(
    st.tuples(st.sampled_from(["get_weather", "f"]), st.dictionaries(IDENTIFIERS, JSON_VALUES, max_size=3)),
    min_size=1, max_size=3,
)


@given(calls=PYTHON_CALLS, start=st.sampled_from(["", "<|python_start|>", "\n "]), cuts=CUTS)
def test_pythonic(calls: list[tuple[str, Any]], start: str, cuts: list[int]) -> None:
    """Against Python's own parser."""
    text = "[" + ", ".join(f"{name}({', '.join(f'{k}={v!r}' for k, v in each.items())})" for name, each in calls) + "]"
    tree = ast.parse(text, mode="eval").body
    assert isinstance(tree, ast.List)
    truth = [
        (call.func.id, {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords})
        for call in tree.elts
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name)
    ]
    end = "<|python_end|>" if start.startswith("<") else ""
    assert read(parse("pythonic", start + text + end, cuts)) == ("", truth)


XML_VALUES = st.text(st.characters(codec="utf-8", exclude_characters="\r"), max_size=20)
XML_CALLS = st.lists(
    st.tuples(
        st.sampled_from(["get_weather", "f"]),
        st.fixed_dictionaries(
            {}, optional={"city": XML_VALUES, "days": st.integers(), "where": ARGUMENTS, "more": XML_VALUES}
        ),
    ),
    min_size=1, max_size=3,
)


@given(calls=XML_CALLS, has_block=st.booleans(), cuts=CUTS)
def test_qwen3_coder(calls: list[tuple[str, Any]], has_block: bool, cuts: list[int]) -> None:
    """Against regular expressions for the tags and the types of the schema."""
    text = "I look.\n"
    for name, arguments in calls:
        inner = "".join(
            f"<parameter={key}>\n{value if isinstance(value, str) else json.dumps(value)}\n</parameter>\n"
            for key, value in arguments.items()
        )
        function = f"<function={name}>\n{inner}</function>\n"
        text += f"<tool_call>\n{function}</tool_call>\n" if has_block else function
    found = []
    for name, body in re.findall(r"<function=(.*?)>\n(.*?)</function>", text, re.DOTALL):
        pairs = re.findall(r"<parameter=(.*?)>\n(.*?)\n</parameter>", body, re.DOTALL)
        found.append((name, {key: value if key in ("city", "more") else json.loads(value) for key, value in pairs}))
    if without_markers(calls, "<", ">"):
        assert found == calls
        assert read(parse("qwen3_coder", text, cuts)) == ("I look.", calls)


def test_qwen3_coder_reads_values_by_the_schema() -> None:
    text = (
        "<tool_call><function=f><parameter=city>12</parameter><parameter=days>\nmany\n</parameter>"
        "<parameter=where>{'a': None}</parameter></function></tool_call>"
    )
    assert read(parse("qwen3_coder", text, [3])) == ("", [("f", {"city": "12", "days": "many", "where": {"a": None}})])


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "007", "007"),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "null", None),
        ({"oneOf": [{"const": "a"}, {"enum": ["12"]}]}, "12", "12"),
        ({"type": ["string", "null"]}, "12", "12"),
        ({"type": ["string", "array"]}, "['12']", ["12"]),
        ({"type": ["string", "integer"]}, "12", 12),
        ({"enum": [1, 2]}, "2", 2),
        ({"enum": ["1", "2"]}, "2", "2"),
        ({"const": True}, "true", True),
        ({"$ref": "#/$defs/a"}, "12", 12),
        ({}, "12", "12"),
    ],
)
def test_a_value_of_qwen3_coder_has_a_type_that_its_schema_allows(schema: Any, text: str, value: Any) -> None:
    function = {"name": "f", "parameters": {"type": "object", "properties": {"a": schema}}}
    tools = read_tools(json.dumps([{"type": "function", "function": function}]), "", True).tools
    parser = FORMATS["qwen3_coder"].make_parser(tools)
    deltas = parser.feed(f"<function=f>\n<parameter=a>\n{text}\n</parameter>\n</function>") + parser.finish()
    assert read(deltas) == ("", [("f", {"a": value})])


@given(cuts=CUTS)
def test_qwen3_coder_may_leave_out_the_ends_of_parameters(cuts: list[int]) -> None:
    text = "<tool_call>\n<function=f>\n<parameter=city>\nRome\n<parameter=days>\n3\n</function>\n</tool_call>"
    assert read(parse("qwen3_coder", text, cuts)) == ("", [("f", {"city": "Rome", "days": 3})])


@given(cuts=CUTS)
def test_a_string_of_qwen3_coder_may_hold_the_end_of_a_function(cuts: list[int]) -> None:
    """Where more of the string follows, and the end of the parameter."""
    city = "<a>\n</function>\n</a>\n</function>"
    end = "\n</parameter>\n</function>\n"
    text = f"<function=f>\n<parameter=city>\n{city}{end}</tool_call>\n<function=f>\n<parameter=days>\n3{end}"
    assert read(parse("qwen3_coder", text, cuts)) == ("", [("f", {"city": city}), ("f", {"days": 3})])


@pytest.mark.parametrize(
    "rest", ["", "\n", "\n</tool_call>", "\n<function=f>\n</function>", "<tool_call><function=f></function>"]
)
@given(cuts=CUTS)
def test_the_end_of_a_function_of_qwen3_coder_may_end_its_last_value(rest: str, cuts: list[int]) -> None:
    text = f"<function=f>\n<parameter=city>\nRome\n</function>{rest}"
    further = [("f", {})] if "=f" in rest else []
    assert read(parse("qwen3_coder", text, cuts)) == ("", [("f", {"city": "Rome"}), *further])


@pytest.mark.parametrize("is_cut", [False, True])
@given(cuts=CUTS)
def test_a_call_of_qwen3_coder_is_whole_where_the_answer_ends_within_the_end_of_its_block(
    is_cut: bool, cuts: list[int]
) -> None:
    text = "<tool_call><function=f>\n<parameter=city>\nRome\n</function>\n</tool_ca"
    assert read(parse("qwen3_coder", text, cuts, is_cut)) == ("", [("f", {"city": "Rome"})])


def test_objects_that_are_no_calls_stay_content() -> None:
    for text in (
        '{"city": "Paris"}',
        '{"name": "Ann", "parameters": {}}',
        '{"name": {}}',
        '{"name": "f", "age": 3}',
        'Use {"name": "f", "parameters": {}} for that.',
        '{"user": {"name": "f", "parameters": {}}}',
        "<|python_tag|>print(1)",
    ):
        assert read(parse("llama3_json", text, [2])) == (text, [])
    for text in ("[1, 2]", "[unknown(a=1)]", "see [f(city=1)]", "[f]", "[f", "f(a=1)"):
        assert read(parse("pythonic", text, [2])) == (text, [])


def test_ids_of_mistral_have_nine_characters() -> None:
    deltas = parse("mistral", "[TOOL_CALLS]f[ARGS]{}[TOOL_CALLS]f[ARGS]{}", [5])
    first, second = (each.call_id for each in deltas if isinstance(each, CallBegin))
    assert re.fullmatch("[a-zA-Z0-9]{9}", first) and re.fullmatch("[a-zA-Z0-9]{9}", second) and first != second


def read(deltas: Sequence[Delta]) -> tuple[str, list[tuple[str, Any]]]:
    """Content, without white space around it, and calls with their arguments read."""
    parts = joined(deltas)
    calls = [(each[0], json.loads(each[1])) for each in parts if isinstance(each, tuple)]
    return "".join(each for each in parts if isinstance(each, str)).strip(), calls


MARKUP = {
    "hermes": ["<tool_call>", "</tool_call>", '{"name": "f", "arguments": ', '{"name": "f"', "}", "{", '"a": ', '"x"'],
    "mistral": [
        "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[", "]", "f", '{"name": "f", "arguments": ', "{", "}", '"a": 1',
    ],
    "llama3_json": ["<|python_tag|>", '{"name": "f", "parameters": ', '{"name": ', '"f"', "{", "}", ";", '"a": 1'],
    "pythonic": ["<|python_start|>", "<|python_end|>", "[", "]", "f(", "city=", "'x", "'", ")", "{", "}", "None", "-"],
    "qwen3_coder": [
        "<tool_call>", "</tool_call>", "<function=f>", "<function=", ">", "</function>", "<parameter=city>",
        "<parameter=days>", "</parameter>", "f",
    ],
}
WRONG = [
    ",", "\n", " ", "1", "[", "]", "true", "nul", "\\", "\\u12", '"', "<", "tool", "é", "\u2028", "\x00", "()", "=",
]


@pytest.mark.parametrize("name", MARKUP)
@settings(max_examples=examples(300))
@given(data=st.data(), cuts=CUTS, is_cut=st.booleans())
def test_any_text_gives_the_same_however_it_is_divided(
    name: str, data: st.DataObject, cuts: list[int], is_cut: bool
) -> None:
    pieces = data.draw(st.lists(st.sampled_from(MARKUP[name] + WRONG), max_size=25))
    text = "".join(pieces)
    whole, divided = parse(name, text, [len(text) + 1], is_cut), parse(name, text, cuts, is_cut)
    assert joined(divided) == joined(whole)
    assert streamed(divided) == streamed(whole)
    open_calls = [each.index for each in whole if isinstance(each, CallBegin)]
    assert open_calls == list(range(len(open_calls))) == [each.index for each in whole if isinstance(each, CallEnd)]
    ends = [each for each in whole if isinstance(each, CallEnd)]
    assert all(each.is_complete for each in ends[:-1] if each.malformed is None), "only the last call is cut off"
    calls = [part for part in joined(whole) if isinstance(part, tuple)]
    for index, (_, arguments) in enumerate(calls):
        if index == len(calls) - 1 and ends[-1].is_cut:
            assert not arguments or isinstance(from_json(arguments, allow_partial="trailing-strings"), dict)
        else:
            assert isinstance(json.loads(arguments), dict), "a call that is not malformed has an object"
        arguments.encode()
