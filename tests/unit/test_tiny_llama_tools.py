"""The embedded model calls tools as its README promises, when transformers loads it unchanged."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

MODEL_DIR = Path(__file__).parents[2] / "deploy" / "models" / "tiny-llama"
CALL_START, CALL_END = "<tool_call>\n", "\n</tool_call>"

Message = dict[str, Any]
Tool = dict[str, Any]


def tool(name: str, *parameters: str) -> Tool:
    properties = {parameter: {"type": "string", "description": "Some text."} for parameter in parameters}
    schema = {"type": "object", "properties": properties, "required": list(parameters)}
    return {"type": "function", "function": {"name": name, "description": "Does it.", "parameters": schema}}


GET_WEATHER = tool("get_weather", "city")
CALCULATE = tool("calculate", "expression")
GET_TIME = tool("get_time", "city")


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(MODEL_DIR)


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(MODEL_DIR, dtype=torch.float32)


@pytest.fixture
def answer(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Any:
    def generate(messages: list[Message], tools: list[Tool]) -> str:
        """The greedy answer, which must end with EOS."""
        prompt = tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=True, return_dict=False)
        output = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=200)[0, len(prompt) :]
        assert output[-1] == tokenizer.eos_token_id
        return str(tokenizer.decode(output[:-1]))

    return generate


def user(content: str) -> Message:
    return {"role": "user", "content": content}


def calls_of(text: str) -> list[Any]:
    """The calls of an answer that consists of calls alone."""
    pieces = text.split(CALL_END + "\n" + CALL_START)
    pieces[0] = pieces[0].removeprefix(CALL_START)
    pieces[-1] = pieces[-1].removesuffix(CALL_END)
    return [json.loads(piece) for piece in pieces]


def weather_call(city: str) -> Message:
    return {"name": "get_weather", "arguments": {"city": city}}


def calling(*calls: Message) -> Message:
    tool_calls = [{"type": "function", "function": call} for call in calls]
    return {"role": "assistant", "content": "", "tool_calls": tool_calls}


@pytest.mark.parametrize("tools", [[GET_WEATHER], [CALCULATE, GET_WEATHER], [GET_TIME, GET_WEATHER, CALCULATE]])
@pytest.mark.parametrize("city", ["Paris", "New York", "Kyoto"])
def test_weather_is_asked_of_the_tool(answer: Any, tools: list[Tool], city: str) -> None:
    assert calls_of(answer([user(f"What is the weather in {city}?")], tools)) == [weather_call(city)]


def test_weather_of_two_cities_takes_two_calls(answer: Any) -> None:
    calls = calls_of(answer([user("What is the weather in London and Tokyo?")], [GET_WEATHER]))
    assert calls == [weather_call("London"), weather_call("Tokyo")]


@pytest.mark.parametrize("city", ["Elsela", "Grato"])
def test_a_made_up_city_is_copied(answer: Any, city: str) -> None:
    assert calls_of(answer([user(f"What is the weather in {city}?")], [GET_WEATHER])) == [weather_call(city)]


@pytest.mark.parametrize("expression", ["17 * 23", "408 + 77", "9-5"])
def test_a_sum_is_given_to_the_tool(answer: Any, expression: str) -> None:
    calls = calls_of(answer([user(f"What is {expression}?")], [GET_WEATHER, CALCULATE]))
    assert calls == [{"name": "calculate", "arguments": {"expression": expression}}]


@pytest.mark.parametrize("result", ["21 °C, sunny", '{"temperature": 7, "condition": "rainy"}'])
def test_the_result_of_a_call_is_repeated(answer: Any, result: str) -> None:
    messages = [user("What is the weather in Paris?"), calling(weather_call("Paris"))]
    messages.append({"role": "tool", "content": result})
    assert answer(messages, [GET_WEATHER]) == f"The weather in Paris: {result}."


def test_other_questions_are_answered_as_without_tools(answer: Any) -> None:
    text = answer([user("What is the capital of France?")], [GET_WEATHER, CALCULATE])
    assert text == "The capital of France is Paris, which lies on the river Seine."


def test_without_tools_the_weather_is_not_known(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> None:
    prompt = tokenizer.apply_chat_template(
        [user("What is the weather in Paris?")], add_generation_prompt=True, return_dict=False
    )
    output = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=60)[0, len(prompt) :]
    assert tokenizer.decode(output).startswith("I am too small to know that.")
