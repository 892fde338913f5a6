"""Forms of answers in Harmony: calls that are demanded, and forms of the final message alone, after free reasoning."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from services.common.errors import InvalidRequest
from services.common.structured_output import Constraint, StructuredOutput
from services.gateway.text.answer_grammar import answer_grammar
from services.gateway.text.harmony.parser import Beginning
from services.gateway.text.parsing import Parsing
from services.gateway.text.tools.formats import FORMATS
from services.gateway.text.tools.tool import Tools, read_tools
from services.grammar.matcher import GrammarMatcher
from services.grammar.vocabulary import read_vocabulary
from tests.support.chats.chat_models import EOS, TIME, TOKENIZER, WEATHER, make_chat_model
from tests.support.dense.forms import Forms
from tests.unit.gateway.text.tools.test_call_grammars import allowed

END = TOKENIZER.convert_tokens_to_ids(EOS)
THOUGHT = "<|channel|>analysis<|message|>Hm. {}<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>"
CALL = '<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city": "Rome"}'
NUMBER = StructuredOutput(Constraint.JSON_SCHEMA, '{"type": "integer"}')


@pytest.fixture(scope="module")
def forms(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forms]:
    path = make_chat_model(tmp_path_factory.mktemp("forms") / "model", "harmony")
    yield Forms(read_vocabulary(path, len(TOKENIZER), [END]))


def structured_output_of(
    choice: str = "",
    given: StructuredOutput | None = None,
    beginning: Beginning = Beginning.HEADER,
    tools: Any = (WEATHER, TIME),
) -> StructuredOutput | None:
    read = Tools() if given else read_tools(json.dumps(tools), choice, is_parallel=True)
    return answer_grammar(Parsing(None if given else FORMATS["harmony"], read, None, beginning), given)


def accepts(forms: Forms, form: StructuredOutput | None, text: str) -> bool:
    assert form is not None
    matcher = forms.matcher(form)
    for token_id in TOKENIZER.encode(text, add_special_tokens=False):
        if not matcher.is_running or token_id not in allowed(matcher):
            return False
        GrammarMatcher.consume([(matcher, token_id)])
    return matcher.is_complete or END in allowed(matcher)


@pytest.mark.parametrize("choice", ["required", "function:get_weather"])
def test_a_demanded_call_may_follow_reasoning_and_nothing_else(choice: str, forms: Forms) -> None:
    form = structured_output_of(choice)
    assert accepts(forms, form, CALL) and accepts(forms, form, THOUGHT + CALL)
    broken = (CALL.replace("Rome", "Rome\n"), CALL.replace('"city"', '"town"'), CALL[:-1])
    for wrong in ("", FINAL + "No.", THOUGHT, *broken):
        assert not accepts(forms, form, wrong), wrong
    other = CALL.replace("get_weather", "get_time").replace('"city": "Rome"', "")
    assert accepts(forms, form, other) == (choice == "required")
    assert not accepts(forms, form, CALL + "<|call|><|start|>assistant" + CALL), "the answer ends with its only call"


def test_strict_tools_leave_the_choice(forms: Forms) -> None:
    strict = {"type": "function", "function": WEATHER["function"] | {"strict": True}}
    form = structured_output_of("auto", tools=[strict, TIME])
    for right in (FINAL + "Sunny.", THOUGHT + FINAL + "Sunny.", CALL, THOUGHT + CALL):
        assert accepts(forms, form, right), right
    assert not accepts(forms, form, CALL.replace('"city"', '"town"'))
    assert structured_output_of("auto") is None


def test_a_form_holds_for_the_final_message_alone(forms: Forms) -> None:
    form = structured_output_of(given=NUMBER)
    assert accepts(forms, form, FINAL + "12") and accepts(forms, form, THOUGHT + FINAL + "12")
    for wrong in ("12", FINAL + "twelve", THOUGHT, THOUGHT + "12", "<|channel|>commentary<|message|>12"):
        assert not accepts(forms, form, wrong), wrong


def test_the_final_message_has_its_form_beside_tools(forms: Forms) -> None:
    parsing = Parsing(FORMATS["harmony"], read_tools(json.dumps([WEATHER, TIME]), "auto", True), None, Beginning.HEADER)
    form = answer_grammar(parsing, NUMBER)
    for right in (FINAL + "12", THOUGHT + FINAL + "12", CALL, THOUGHT + CALL, CALL.replace('"city"', '"town"')):
        assert accepts(forms, form, right), right
    for wrong in (FINAL + "twelve", "12", CALL[:-1], THOUGHT + "12"):
        assert not accepts(forms, form, wrong), wrong


def test_a_demanded_call_wins_over_a_form(forms: Forms) -> None:
    tools = read_tools(json.dumps([WEATHER, TIME]), "required", True)
    form = answer_grammar(Parsing(FORMATS["harmony"], tools, None, Beginning.HEADER), NUMBER)
    assert accepts(forms, form, CALL) and not accepts(forms, form, FINAL + "12")


def test_a_prompt_without_the_role(forms: Forms) -> None:
    form = structured_output_of(given=NUMBER, beginning=Beginning.MESSAGE)
    assert accepts(forms, form, "<|start|>assistant" + THOUGHT + FINAL + "12")
    assert not accepts(forms, form, FINAL + "12")


def test_an_answer_that_continues_a_message(forms: Forms) -> None:
    assert accepts(forms, structured_output_of(given=NUMBER, beginning=Beginning.CONTENT), "12")
    with pytest.raises(InvalidRequest, match="a message that the answer continues cannot have calls"):
        structured_output_of("required", beginning=Beginning.CONTENT)
