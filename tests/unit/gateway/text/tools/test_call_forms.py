"""Calls that are demanded: whatever a model does, the parser finds calls, and jsonschema accepts their arguments."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import jsonschema
import numpy as np
import pytest

from services.common.errors import InvalidRequest
from services.common.structured_output import StructuredOutput
from services.gateway.text.answer_form import answer_form
from services.gateway.text.answer_parts import AnswerParts, ToolCall
from services.gateway.text.parsing import Parsing
from services.gateway.text.reasoning.think_tags import Beginning, ThinkTags
from services.gateway.text.tools.formats import FORMATS, ToolFormat, choose_tool_format
from services.gateway.text.tools.tool import read_tools
from services.grammar.matcher import GrammarMatcher
from services.grammar.vocabulary import read_vocabulary
from tests.support.chats.chat_models import EOS, TOKENIZER, make_chat_model
from tests.support.dense.forms import Forms

MAX_STEPS = 3000
END = TOKENIZER.convert_tokens_to_ids(EOS)
LEVELS = {"enum": ["low", "high", "it's"]}
TREE = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer", "minimum": 0, "maximum": 14},
        "level": {"type": "string", **LEVELS},
        "where": {
            "type": "object",
            "properties": {"near": {"type": "boolean"}, "tags": {"type": "array", "items": LEVELS, "maxItems": 2}},
            "required": ["near"],
            "additionalProperties": False,
        },
    },
    "required": ["city", "where"],
    "additionalProperties": False,
}
OPTIONAL = {
    "type": "object",
    "properties": {"a": {"type": "null"}, "b": {"type": "integer"}},
    "additionalProperties": False,
}


CALLS_OF_G = {
    "hermes": '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>',
    "llama3_json": '{"name": "g", "parameters": {}}',
    "mistral": "[TOOL_CALLS]g[ARGS]{}",
    "[TOOL_CALLS] [mistral": '[TOOL_CALLS] [{"name": "g", "arguments": {}}]',
    "[pythonic": "[g()]",
    "qwen3_coder": "<tool_call>\n<function=g>\n</function>\n</tool_call>",
}


def tool(name: str, parameters: Any, is_strict: bool = False) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters, "strict": is_strict}}


SCHEMAS = {"get_weather": TREE, "f": OPTIONAL, "g": None}
DEFINITIONS = json.dumps([tool(name, schema) for name, schema in SCHEMAS.items()])
CHOSEN: list[ToolFormat] = [*(each for each in FORMATS.values() if each.make_parser), choose_tool_format("mistral", "")]


@pytest.fixture(scope="module")
def forms(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forms]:
    path = make_chat_model(tmp_path_factory.mktemp("forms") / "model", "hermes")
    yield Forms(read_vocabulary(path, len(TOKENIZER), [END]))


def allowed(matcher: GrammarMatcher) -> list[int]:
    """The tokens that may come next."""
    masks = np.empty((1, matcher.num_words), dtype=np.uint32)
    GrammarMatcher.fill_masks([matcher], masks)
    return np.flatnonzero(np.unpackbits(masks.view(np.uint8), bitorder="little")[: len(TOKENIZER)]).tolist()


def accepts(forms: Forms, form: StructuredOutput, text: str) -> bool:
    """Whether the form allows the text and lets it end there."""
    matcher = forms.matcher(form)
    for token_id in TOKENIZER.encode(text, add_special_tokens=False):
        if not matcher.is_running or token_id not in allowed(matcher):
            return False
        GrammarMatcher.consume([(matcher, token_id)])
    return matcher.is_complete or END in allowed(matcher)


def walk(forms: Forms, form: StructuredOutput, generator: random.Random) -> str | None:
    """A text that some model might write; None if it does not end soon."""
    matcher, output, planned = forms.matcher(form), list[int](), list[int]()
    while matcher.is_running:
        choices = allowed(matcher)
        assert matcher.error is None and choices, (matcher.error, TOKENIZER.decode(output))
        closing = [each for each in choices if TOKENIZER.convert_ids_to_tokens(each) in ('"', "]", "}", ")", "<")]
        if not planned and len(choices) > 100 and generator.random() < 0.2:  # in free text, which would go on for ever
            planned = TOKENIZER.encode("\n</parameter>\n", add_special_tokens=False)
        if planned and planned[0] in choices:
            token_id = planned.pop(0)
        else:
            planned, token_id = [], generator.choice(closing if closing and generator.random() < 0.5 else choices)
        if token_id == END:
            return TOKENIZER.decode(output)
        output.append(token_id)
        GrammarMatcher.consume([(matcher, token_id)])
        if len(output) == MAX_STEPS:
            return None
    return TOKENIZER.decode(output)


def parts_of(chosen: ToolFormat, text: str, definitions: str = DEFINITIONS) -> list[Any]:
    parser, parts = chosen.make_parser(read_tools(definitions, "", True).tools), AnswerParts()
    parts.add(parser.feed(text) + parser.finish())
    return parts.finish()


def check(call: ToolCall) -> None:
    jsonschema.validate(json.loads(call.arguments), SCHEMAS[call.name] or {"maxProperties": 0})


@pytest.mark.parametrize("chosen", CHOSEN, ids=lambda each: next(iter([each.form.list_begin + each.name])))
@pytest.mark.parametrize("choice", ["required", "function:f", "function:get_weather", "single"])
def test_demanded_calls_are_valid_and_alone(chosen: ToolFormat, choice: str, forms: Forms) -> None:
    tools = read_tools(DEFINITIONS, "required" if choice == "single" else choice, is_parallel=choice != "single")
    form = answer_form(Parsing(chosen, tools, None), None)
    assert form is not None
    numbers, texts = set(), 0
    for seed in range(40):
        text = walk(forms, form, random.Random(seed))
        if text is None:
            continue
        texts += 1
        parts = parts_of(chosen, text)
        assert all(isinstance(part, ToolCall) for part in parts), (text, parts)
        for call in parts:
            check(call)
        numbers.add(len(parts))
        if choice.startswith("function:"):
            assert {call.name for call in parts} == {choice.removeprefix("function:")}
    assert texts > 10
    assert numbers == {1} if choice != "required" else max(numbers) > 1


@pytest.mark.parametrize("chosen", CHOSEN, ids=lambda each: next(iter([each.form.list_begin + each.name])))
def test_strict_tools_are_valid_and_need_not_be_called(chosen: ToolFormat, forms: Forms) -> None:
    definitions = json.dumps([tool(name, schema, is_strict=True) for name, schema in SCHEMAS.items()])
    tools = read_tools(definitions, "auto", is_parallel=True)
    form = answer_form(Parsing(chosen, tools, None), None)
    assert form is not None and accepts(forms, form, "It is sunny, 20 degrees.")
    call = CALLS_OF_G[chosen.form.list_begin + chosen.name]
    assert accepts(forms, form, call) and accepts(forms, form, f"I look.\n{call}")
    [*_, found] = parts_of(chosen, f"I look.\n{call}", definitions)
    assert (found.name, found.arguments) == ("g", "{}")
    assert not accepts(forms, form, call.replace("{}", '{"x": 1}').replace("g()", "g(x=1)").replace(">\n</f", ">x</f"))
    assert answer_form(Parsing(chosen, read_tools(DEFINITIONS, "auto", True), None), None) is None


@pytest.mark.parametrize("beginning", [Beginning.REASONING, Beginning.EITHER])
def test_reasoning_may_come_before_demanded_calls(beginning: Beginning, forms: Forms) -> None:
    chosen = FORMATS["hermes"]
    form = answer_form(Parsing(chosen, read_tools(DEFINITIONS, "function:g", True), beginning), None)
    assert form is not None
    call = '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>'
    for begin in {Beginning.REASONING: ["Well. "], Beginning.EITHER: ["<think>\nWell. "]}[beginning]:
        text = f"{begin}</think>\n\n{call}"
        assert accepts(forms, form, text)
        parser = ThinkTags(beginning)
        reasoning, content = parser.feed(text) + parser.finish()
        assert (reasoning.text.strip(), content.text) == ("Well.", call)
        assert not accepts(forms, form, f"{begin}</think>\n\nNo.")
    assert accepts(forms, form, call) == (beginning is Beginning.EITHER)


@pytest.mark.parametrize(
    ("name", "parameters", "words"),
    [
        ("pythonic", {"type": "object", "properties": {"a-b": {}}}, "no name in Python"),
        ("pythonic", {"type": "object", "oneOf": []}, "'oneOf'"),
        ("pythonic", {"type": "object", "required": ["x"]}, "'x' is not one of its properties"),
        ("qwen3_coder", {"type": "object", "properties": {"a": {"type": "string", "pattern": "x"}}}, "pattern"),
        ("qwen3_coder", {"type": "object", "properties": {"a>b": {}}}, "characters"),
        ("qwen3_coder", {"type": "object", "properties": {str(i): {} for i in range(65)}}, "65 parameters, at most 64"),
    ],
)
def test_a_schema_that_a_format_cannot_keep_is_refused(name: str, parameters: Any, words: str) -> None:
    tools = read_tools(json.dumps([tool("f", parameters)]), "required", True)
    with pytest.raises(InvalidRequest, match=words) as refused:
        answer_form(Parsing(FORMATS[name], tools, None), None)
    assert refused.value.param == "tools[0].function.parameters" and "'f'" in str(refused.value)
