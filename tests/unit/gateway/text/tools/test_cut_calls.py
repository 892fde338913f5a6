"""Calls that `max_tokens` cuts off: at every character of every format there is the beginning of the whole answer."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic_core import from_json

from services.gateway.text.answer_parts import AnswerParts, ToolCall
from services.gateway.text.deltas import CallEnd, Delta
from services.gateway.text.tools.formats import FORMATS
from services.gateway.text.tools.tool import read_tools
from services.gateway.text.tools.unfinished_value import unfinished_to_json
from tests.support.examples import examples

PROPERTIES = {"city": {"type": "string"}, "days": {"type": "integer"}, "where": {"type": "object"}}
TOOLS = read_tools(
    json.dumps(
        [
            {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": PROPERTIES}}}
            for name in ("get_weather", "f")
        ]
    ),
    "",
    True,
).tools
Call = tuple[str, dict[str, Any]]


def as_objects(begin: str, key: str, separator: str, end: str) -> Callable[[Sequence[Call]], str]:
    return lambda calls: begin + separator.join(json.dumps({"name": n, key: a}) for n, a in calls) + end


def as_strings(calls: Sequence[Call]) -> str:
    return "\n".join(
        f"<tool_call>{json.dumps({'name': n, 'arguments': json.dumps(a)})}</tool_call>" for n, a in calls
    )


def as_names(calls: Sequence[Call]) -> str:
    return "".join(f"[TOOL_CALLS]{name}[ARGS]{json.dumps(arguments)}" for name, arguments in calls)


def as_python(calls: Sequence[Call]) -> str:
    inner = ", ".join(f"{name}({', '.join(f'{k}={v!r}' for k, v in each.items())})" for name, each in calls)
    return f"[{inner}]<|python_end|>"


def as_tags(calls: Sequence[Call]) -> str:
    text = ""
    for name, arguments in calls:
        inner = "".join(
            f"<parameter={key}>\n{value if isinstance(value, str) else json.dumps(value)}\n</parameter>\n"
            for key, value in arguments.items()
        )
        text += f"<tool_call>\n<function={name}>\n{inner}</function>\n</tool_call>\n"
    return text


# The format, how it writes calls, and the text that ends the name of a call.
WRITERS: dict[str, tuple[str, Callable[[Sequence[Call]], str], str]] = {
    "hermes": ("hermes", as_objects("<tool_call>\n", "arguments", "</tool_call>\n<tool_call>", "\n</tool_call>"), '"'),
    "hermes with strings": ("hermes", as_strings, '"'),
    "mistral list": ("mistral", as_objects("[TOOL_CALLS] [", "arguments", ", ", "]"), '"'),
    "mistral names": ("mistral", as_names, "[ARGS]"),
    "llama3_json": ("llama3_json", as_objects("", "parameters", "; ", ""), '"'),
    "pythonic": ("pythonic", as_python, "("),
    "qwen3_coder": ("qwen3_coder", as_tags, ">"),
}
TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="\r<>["), max_size=12)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(TEXTS, inner, max_size=2),
    max_leaves=5,
)
ARGUMENTS = st.fixed_dictionaries(
    {}, optional={"city": TEXTS, "days": st.integers(), "where": st.dictionaries(TEXTS, VALUES, max_size=2)}
)
CALLS = st.lists(st.tuples(st.sampled_from(["get_weather", "f"]), ARGUMENTS), min_size=1, max_size=2)


def parse(format_name: str, text: str, size: int) -> list[Delta]:
    parser, deltas = FORMATS[format_name].make_parser(TOOLS), []
    for start in range(0, len(text), size):
        deltas += parser.feed(text[start : start + size])
    return deltas + parser.finish(is_cut=True)


def parts_of(deltas: Sequence[Delta]) -> tuple[str, list[tuple[str, str]]]:
    """The text, and name and arguments of each call, as a client of a whole answer gets them."""
    parts = AnswerParts()
    parts.add(deltas)
    parts.finish()
    return parts.text(), [(each.name, each.arguments) for each in parts.parts if isinstance(each, ToolCall)]


def streamed(deltas: Sequence[Delta]) -> tuple[str, list[tuple[str, str]]]:
    """The same, as a client of the stream puts it together: it has no ends of calls."""
    return parts_of([CallEnd(each.index) if isinstance(each, CallEnd) else each for each in deltas])


def begins(part: Any, whole: Any) -> bool:
    """Whether one value is the beginning of another one. Digits of a number may be missing."""
    if isinstance(part, str) and isinstance(whole, str):
        return whole.startswith(part)
    if isinstance(part, dict) and isinstance(whole, dict):
        return begins(list(part), list(whole)) and all(begins(part[key], whole[key]) for key in part)
    if isinstance(part, list) and isinstance(whole, list):
        return len(part) <= len(whole) and all(begins(*pair) for pair in zip(part, whole, strict=False))
    if isinstance(part, int | float) and type(part) is not bool:
        return isinstance(whole, int | float) and type(whole) is not bool
    return part is whole


@pytest.mark.parametrize("name", WRITERS)
@settings(max_examples=examples(6, 3), deadline=None)
@given(calls=CALLS, size=st.integers(1, 9))
def test_an_answer_cut_at_any_character_is_a_beginning(name: str, calls: list[Call], size: int) -> None:
    format_name, write, _ = WRITERS[name]
    text = "I look.\n" + write(calls)
    whole = parts_of(parse(format_name, text, size))[1]
    assert [(each[0], json.loads(each[1])) for each in whole] == calls
    for cut in range(len(text)):
        deltas = parse(format_name, text[:cut], size)
        content, found = parts_of(deltas)
        assert streamed(deltas) == parts_of(parse(format_name, text[:cut], len(text))) == (content, found)
        assert found[:-1] == whole[: max(0, len(found) - 1)]
        if not found:
            assert content == text[:cut], "what is no call yet is text"
            continue
        last_name, last_arguments = whole[len(found) - 1]
        assert found[-1][0] == last_name
        assert last_arguments.startswith(found[-1][1])
        if found[-1][1]:
            part = from_json(found[-1][1], allow_partial="trailing-strings")
            assert begins(part, calls[len(found) - 1][1])
        ends = [each for each in deltas if isinstance(each, CallEnd)]
        assert [each.is_complete for each in ends[:-1]] == [True] * (len(found) - 1)
        assert ends[-1].malformed is None and (ends[-1].is_complete <= (found[-1][1] == last_arguments))


@pytest.mark.parametrize("name", WRITERS)
def test_no_character_of_a_value_is_lost(name: str) -> None:
    format_name, write, end_of_name = WRITERS[name]
    city = "Saint-Étienne, 'Loire'"
    text = write([("get_weather", {"where": {"a": [1, None, "x"]}, "city": city})])
    name_end = text.index(end_of_name, text.index("get_weather")) + len(end_of_name)
    marks = [json.dumps(city)[1:-1], json.dumps(json.dumps(city))[3:-3], city]
    written = next(mark for mark in marks if mark in text)
    start = text.index(written)
    for cut in range(name_end):
        assert parts_of(parse(format_name, text[:cut], 4)) == (text[:cut], []), "a name may go on"
    seen = set()
    for cut in range(name_end, len(text)):
        content, [(called, arguments)] = parts_of(parse(format_name, text[:cut], 4))
        assert (content, called) == ("", "get_weather")
        if cut > start:
            values = from_json(arguments, allow_partial="trailing-strings")
            assert values["where"] == {"a": [1, None, "x"]}
            seen.add(values["city"])
            if written == city and cut <= start + len(city):
                assert values["city"] == city[: cut - start]
    assert seen >= {city[:length] for length in range(1, len(city) + 1)}


@pytest.mark.parametrize(
    ("text", "beginning"),
    [
        ("", ""), ("Tru", "tru"), ("No", "nu"), ("fals", "fals"), ("-", "-"), ("1.", "1."), ("2e+", "2e+"),
        ("'it\\'s", '"it\'s'), ("'a\\", '"a'), ('"\\ud83d\\ude', '"'), ('"\\ud83d\\ude00', '"😀'), ("'\\x4", '"'),
        ("[1,", "[1"), ("(1, ", "[1"), ("{'a': [True, {'b'", '{"a": [true, {"b"'), ("{'a'  :", '{"a": '),
        ("12 monkeys", '"12 monkeys'), ("may", '"may'), ("[a", '"[a'), ('say "a', '"say \\"a'),
    ],
)  # fmt: skip
def test_beginnings_of_values(text: str, beginning: str) -> None:
    assert unfinished_to_json(text) == beginning


@pytest.mark.parametrize(
    ("format_name", "text", "content"),
    [
        ("hermes", '<tool_call>{"name": "f", "arguments": {}}</tool_ca', ""),
        ("qwen3_coder", "<tool_call><function=f></function></tool_ca", ""),
        ("pythonic", "[f()]<|python_e", ""),
        ("hermes", '<tool_call>{"arguments": {"a": 1', '<tool_call>{"arguments": {"a": 1'),
        ("hermes", '<tool_call>{"name": "f", "arguments": "[1', '<tool_call>{"name": "f", "arguments": "[1'),
        ("hermes", "no call </tool_ca", "no call </tool_ca"),
    ],
)
def test_only_the_end_marker_of_a_call_is_dropped(format_name: str, text: str, content: str) -> None:
    deltas = parse(format_name, text, 3)
    assert parts_of(deltas)[0] == streamed(deltas)[0] == content
