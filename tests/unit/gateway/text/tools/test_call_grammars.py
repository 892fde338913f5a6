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
from services.common.structured_output import Constraint, StructuredOutput
from services.gateway.text.answer_grammar import answer_grammar
from services.gateway.text.answer_parts import AnswerParts, TextPart, ToolCall
from services.gateway.text.parsing import Parsing
from services.gateway.text.reasoning.think_tags import Beginning, ThinkTags
from services.gateway.text.tools.formats import FORMATS, ToolFormat, choose_tool_format
from services.gateway.text.tools.tool import NO_TOOLS, read_tools
from services.grammar.matcher import GrammarMatcher
from services.grammar.vocabulary import read_vocabulary
from tests.support.chats.chat_models import EOS, TOKENIZER, make_chat_model
from tests.support.dense.forms import Forms
from tests.support.examples import examples

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
    "properties": {"a": {"type": "null"}, "b": {"type": "integer"}, "c": {"enum": [1, True, None]}},
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


def walk(forms: Forms, form: StructuredOutput, generator: random.Random, begin: str = "") -> str | None:
    """A text that some model might write, with this beginning if possible; None if it does not end soon."""
    matcher, output, planned = forms.matcher(form), list[int](), TOKENIZER.encode(begin, add_special_tokens=False)
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


@pytest.mark.parametrize("chosen", CHOSEN, ids=lambda each: next(iter([each.grammar.list_begin + each.name])))
@pytest.mark.parametrize("choice", ["required", "function:f", "function:get_weather", "single"])
def test_demanded_calls_are_valid_and_alone(chosen: ToolFormat, choice: str, forms: Forms) -> None:
    tools = read_tools(DEFINITIONS, "required" if choice == "single" else choice, is_parallel=choice != "single")
    form = answer_grammar(Parsing(chosen, tools, None), None)
    assert form is not None
    numbers, texts = set(), 0
    for seed in range(examples(40, 18)):
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


@pytest.mark.parametrize("chosen", CHOSEN, ids=lambda each: next(iter([each.grammar.list_begin + each.name])))
def test_strict_tools_are_valid_and_need_not_be_called(chosen: ToolFormat, forms: Forms) -> None:
    definitions = json.dumps([tool(name, schema, is_strict=True) for name, schema in SCHEMAS.items()])
    tools = read_tools(definitions, "auto", is_parallel=True)
    form = answer_grammar(Parsing(chosen, tools, None), None)
    assert form is not None and accepts(forms, form, "It is sunny, 20 degrees.")
    call = CALLS_OF_G[chosen.grammar.list_begin + chosen.name]
    assert accepts(forms, form, call) and accepts(forms, form, f"I look.\n{call}")
    [*_, found] = parts_of(chosen, f"I look.\n{call}", definitions)
    assert (found.name, found.arguments) == ("g", "{}")
    assert not accepts(forms, form, call.replace("{}", '{"x": 1}').replace("g()", "g(x=1)").replace(">\n</f", ">x</f"))
    assert answer_grammar(Parsing(chosen, read_tools(DEFINITIONS, "auto", True), None), None) is None


PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name"],
    "additionalProperties": False,
}
FLAGS = {"type": "array", "items": {"type": ["boolean", "null"]}}
SAME_NAME = '{"name": "g"}'  # begins as a call of llama3_json does
OWN_FORMS: list[tuple[StructuredOutput, list[str], list[str]]] = [
    (StructuredOutput(Constraint.JSON_SCHEMA, json.dumps(PERSON)), [SAME_NAME, '{"name":"f","age":3}'], ['{"age": 3}']),
    (StructuredOutput(Constraint.JSON_SCHEMA, json.dumps(FLAGS)), ["[false]", "[null, true]"], ["[get]", "[0]"]),
    (StructuredOutput(Constraint.JSON_OBJECT), ["{}", SAME_NAME], ["[]"]),
    (StructuredOutput(Constraint.REGEX, "[0-9]{2}"), ["12"], ["1"]),
    (StructuredOutput(Constraint.CHOICE, choices=("yes", "no")), ["yes"], ["maybe"]),
    (StructuredOutput(Constraint.GRAMMAR, 'root ::= "a" root? "b"'), ["ab", "aabb"], ["aab"]),
]


@pytest.mark.parametrize("chosen", CHOSEN, ids=lambda each: next(iter([each.grammar.list_begin + each.name])))
@pytest.mark.parametrize(("own", "right", "wrong"), OWN_FORMS, ids=[each[0].constraint.value for each in OWN_FORMS])
def test_an_answer_has_its_form_or_is_calls(
    own: StructuredOutput, right: list[str], wrong: list[str], chosen: ToolFormat, forms: Forms
) -> None:
    parsing = Parsing(chosen, read_tools(DEFINITIONS, "auto", True), None, has_grammar=True)
    form = answer_grammar(parsing, own)
    assert form is not None and form.field_name == own.field_name
    call = CALLS_OF_G[chosen.grammar.list_begin + chosen.name]
    for text in (*right, call):
        assert accepts(forms, form, text), text
    free_call = call.replace("{}", '{"x": [1]}').replace("g()", "g(x=[1])")
    free_call = free_call.replace(">\n</f", ">\n<parameter=x>\n[1]\n</parameter>\n</f")
    assert accepts(forms, form, free_call), "no tool is strict"
    for text in (*wrong, "", f"It is: {call}"):
        assert not accepts(forms, form, text), text


@pytest.mark.parametrize("chosen", CHOSEN, ids=lambda each: next(iter([each.grammar.list_begin + each.name])))
def test_whatever_a_model_writes_is_calls_or_has_the_form(chosen: ToolFormat, forms: Forms) -> None:
    definitions = json.dumps([tool(name, schema, is_strict=True) for name, schema in SCHEMAS.items()])
    tools = read_tools(definitions, "auto", is_parallel=True)
    parsing = Parsing(chosen, tools, None, has_grammar=True)
    form = answer_grammar(parsing, OWN_FORMS[0][0])
    assert form is not None
    kinds = set()
    for seed in range(examples(60)):
        call = CALLS_OF_G[chosen.grammar.list_begin + chosen.name]
        text = walk(forms, form, random.Random(seed), begin=call[: call.index("g") + 2] if seed % 3 == 0 else "")
        if text is None:
            continue
        for parts in (read_answer(parsing, [text]), read_answer(parsing, list(text))):
            kinds.add(type(parts[0]))
            if isinstance(parts[0], TextPart):
                [part] = parts
                assert part.text == text
                jsonschema.validate(json.loads(text), PERSON)
            for call in parts:
                if isinstance(call, ToolCall):
                    check(call)
    assert kinds == {TextPart, ToolCall}


def read_answer(parsing: Parsing, pieces: list[str]) -> list[Any]:
    parser, parts = parsing.make_parser(), AnswerParts()
    for piece in pieces:
        parts.add(parser.feed_token(piece, None))
    parts.add(parser.finish("", is_cut=False))
    return parts.finish()


@pytest.mark.parametrize("chosen", CHOSEN, ids=lambda each: next(iter([each.grammar.list_begin + each.name])))
def test_a_call_written_within_a_form_is_text(chosen: ToolFormat) -> None:
    call = CALLS_OF_G[chosen.grammar.list_begin + chosen.name]
    parsing = Parsing(chosen, read_tools(DEFINITIONS, "auto", True), None, has_grammar=True)
    for text in (f'{{"name": "{call}"}}', f"[\n{call}\n]", f" 12 {call}"):
        for pieces in ([text], list(text), [text[:1], text[1:]]):
            [part] = read_answer(parsing, pieces)
            assert isinstance(part, TextPart) and part.text == text
    for text in (call, f"\n{call}"):
        [part] = read_answer(parsing, [text])
        assert isinstance(part, ToolCall) and part.name == "g"


STRUCTURES = '[{"begin": "<tool_call>", "schema": {"const": {"name": "g"}}, "end": "</tool_call>"}]'
TAGGED = f'{{"type": "structural_tag", "structures": {STRUCTURES}, "triggers": ["<tool_call>"]}}'


@pytest.mark.parametrize("beginning", [None, Beginning.REASONING])
def test_a_structural_tag_says_itself_where_calls_stand(beginning: Beginning | None, forms: Forms) -> None:
    own = StructuredOutput(Constraint.STRUCTURAL_TAG, TAGGED, field_name="response_format")
    parsing = Parsing(FORMATS["hermes"], read_tools(DEFINITIONS, "auto", True), beginning)
    form = answer_grammar(parsing, own)
    begin = "" if beginning is None else "Well.</think>\n"
    text = 'I look.<tool_call>{"name":"g"}</tool_call>'
    assert form is not None and accepts(forms, form, begin + text)
    assert not accepts(forms, form, begin + CALLS_OF_G["hermes"])
    [*_, call] = read_answer(parsing, [begin + text])
    assert isinstance(call, ToolCall) and call.name == "g"
    strict = read_tools(json.dumps([tool("g", None, is_strict=True)]), "auto", True)
    with pytest.raises(InvalidRequest, match="no tool can be strict beside it") as refused:
        answer_grammar(Parsing(FORMATS["hermes"], strict, None), own)
    assert refused.value.param == "response_format"


@pytest.mark.parametrize("choice", ["required", "function:g"])
def test_a_demanded_call_wins_over_a_form(choice: str, forms: Forms) -> None:
    parsing = Parsing(FORMATS["hermes"], read_tools(DEFINITIONS, choice, True), None)
    form = answer_grammar(parsing, OWN_FORMS[0][0])
    assert form == answer_grammar(parsing, None) and form is not None
    assert accepts(forms, form, CALLS_OF_G["hermes"]) and not accepts(forms, form, SAME_NAME)


def test_reasoning_may_come_before_a_form_or_calls(forms: Forms) -> None:
    tools = read_tools(DEFINITIONS, "auto", True)
    for own in (OWN_FORMS[0][0], OWN_FORMS[5][0]):
        form = answer_grammar(Parsing(FORMATS["hermes"], tools, Beginning.REASONING, has_grammar=True), own)
        assert form is not None
        right = "ab" if own.constraint is Constraint.GRAMMAR else SAME_NAME
        for text in (right, CALLS_OF_G["hermes"]):
            assert accepts(forms, form, f"Well.</think>\n\n{text}"), text
        assert not accepts(forms, form, right)


@pytest.mark.parametrize("beginning", [Beginning.REASONING, Beginning.EITHER])
def test_reasoning_may_come_before_demanded_calls(beginning: Beginning, forms: Forms) -> None:
    chosen = FORMATS["hermes"]
    form = answer_grammar(Parsing(chosen, read_tools(DEFINITIONS, "function:g", True), beginning), None)
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


def test_what_stands_between_reasoning_and_a_form_is_short_and_not_part_of_the_content(forms: Forms) -> None:
    own = StructuredOutput(Constraint.REGEX, "[ab]+")
    form = answer_grammar(Parsing(None, NO_TOOLS, Beginning.REASONING, has_grammar=True), own)
    assert form is not None
    for between in ("", "\n", "\n\n"):
        text = f"Well.</think>{between}ab"
        assert accepts(forms, form, text)
        parser = ThinkTags(Beginning.REASONING)
        reasoning, content = parser.feed(text) + parser.finish()
        assert (reasoning.text, content.text) == ("Well.", "ab")
    for between in (" ", "\n ", 1000 * "\n"):
        assert not accepts(forms, form, f"Well.</think>{between}ab")


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
        answer_grammar(Parsing(FORMATS[name], tools, None), None)
    assert refused.value.param == "tools[0].function.parameters" and "'f'" in str(refused.value)
