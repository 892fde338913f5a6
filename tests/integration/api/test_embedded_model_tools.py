"""A whole conversation with calls of tools, by the embedded model and OpenAI's client, as docs/tools.md shows it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.support.cluster import Cluster

WEATHER = {"Paris": "21 °C, sunny", "Rome": "cloudy, 15 degrees"}
TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather of a city",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]


@pytest.fixture
def api(cluster: Cluster) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(api_key="none", base_url=f"http://{cluster.http_address}/v1", max_retries=0) as api:
        yield api


@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "streamed"])
def test_the_model_calls_a_tool_and_answers_with_its_result(api: openai.OpenAI, is_streamed: bool) -> None:
    def ask(messages: list[Any]) -> Any:
        options: Any = {"model": "tiny-llama", "messages": messages, "tools": TOOLS, "max_tokens": 200}
        options["temperature"] = 0
        if not is_streamed:
            return api.chat.completions.create(**options).choices[0]
        with api.chat.completions.stream(**options) as stream:
            return stream.get_final_completion().choices[0]

    messages: list[Any] = [{"role": "user", "content": "What is the weather in Paris and Rome?"}]
    choice = ask(messages)
    assert choice.finish_reason == "tool_calls"
    cities = [json.loads(call.function.arguments)["city"] for call in choice.message.tool_calls]
    assert cities == ["Paris", "Rome"]

    messages.append(choice.message)
    for call, city in zip(choice.message.tool_calls, cities, strict=True):
        messages.append({"role": "tool", "tool_call_id": call.id, "content": WEATHER[city]})
    choice = ask(messages)
    assert choice.finish_reason == "stop"
    assert choice.message.content == "The weather in Paris: 21 °C, sunny. In Rome: cloudy, 15 degrees."


def test_a_question_that_needs_no_tool_is_answered(api: openai.OpenAI) -> None:
    question: Any = [{"role": "user", "content": "What is the capital of France?"}]
    answer = api.chat.completions.create(model="tiny-llama", messages=question, tools=TOOLS, temperature=0)
    assert answer.choices[0].message.content == "The capital of France is Paris, which lies on the river Seine."
    assert answer.choices[0].message.tool_calls is None
