"""A whole conversation with calls of tools, by the embedded model and OpenAI's client, as docs/tools.md shows it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx2
import jsonschema
import openai
import pytest
from transformers import AutoTokenizer

from services.common.config import EMBEDDED_MODEL
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


REPORT = {
    "type": "object",
    "properties": {"summary": {"type": "string", "maxLength": 60}},
    "required": ["summary"],
    "additionalProperties": False,
}
QUESTION = "What is the weather in Paris and Rome?"


@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "streamed"])
def test_a_chat_with_tools_and_a_form_calls_and_then_has_the_form(api: openai.OpenAI, is_streamed: bool) -> None:
    def ask(messages: list[Any], **more: Any) -> Any:
        schema: Any = {"type": "json_schema", "json_schema": {"name": "report", "schema": REPORT, "strict": True}}
        options: Any = {"model": "tiny-llama", "messages": messages, "tools": TOOLS, "response_format": schema}
        options |= {"temperature": 0, "max_tokens": 200} | more
        if not is_streamed:
            return api.chat.completions.create(**options).choices[0].message
        with api.chat.completions.stream(**options) as stream:
            return stream.get_final_completion().choices[0].message

    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    called = ask(messages)
    assert [json.loads(call.function.arguments) for call in called.tool_calls] == [{"city": "Paris"}, {"city": "Rome"}]
    assert not called.content
    [demanded] = ask(messages, tool_choice={"type": "function", "function": {"name": "get_weather"}}).tool_calls
    assert "city" in json.loads(demanded.function.arguments)
    messages.append({"role": "assistant", "tool_calls": [call.model_dump() for call in called.tool_calls]})
    for call, text in zip(called.tool_calls, WEATHER.values(), strict=True):
        messages.append({"role": "tool", "tool_call_id": call.id, "content": text})
    # This model was never taught to answer with JSON: unless it is led there, it calls again.
    brace = str(AutoTokenizer.from_pretrained(EMBEDDED_MODEL).convert_tokens_to_ids("{"))
    answer = ask(messages, logit_bias={brace: 100})
    jsonschema.validate(json.loads(answer.content), REPORT)
    assert not answer.tool_calls


def test_responses_with_tools_and_a_form(api: openai.OpenAI) -> None:
    def ask(items: list[Any], **more: Any) -> Any:
        tools: Any = [{"type": "function", "strict": None, **TOOLS[0]["function"]}]
        text: Any = {"format": {"type": "json_schema", "name": "report", "schema": REPORT, "strict": True}}
        return api.responses.create(model="tiny-llama", input=items, tools=tools, text=text, temperature=0, **more)

    items: list[Any] = [{"role": "user", "content": QUESTION}]
    calls: Any = ask(items).output
    assert [json.loads(call.arguments) for call in calls] == [{"city": "Paris"}, {"city": "Rome"}]
    demanded: Any = ask(items, tool_choice="required").output
    assert {item.type for item in demanded} == {"function_call"}
    for call, text in zip(calls, WEATHER.values(), strict=True):
        items.append(call.model_dump(exclude_none=True))
        items.append({"type": "function_call_output", "call_id": call.call_id, "output": text})
    jsonschema.validate(json.loads(ask(items, tool_choice="none").output_text), REPORT)


def test_messages_with_tools_and_a_form(cluster: Cluster) -> None:
    def ask(messages: list[Any], **more: Any) -> list[Any]:
        body = {"model": "tiny-llama", "messages": messages, "max_tokens": 200, "temperature": 0}
        body["tools"] = [{"name": "get_weather", "input_schema": TOOLS[0]["function"]["parameters"]}]
        body["output_config"] = {"format": {"type": "json_schema", "schema": REPORT}}
        answer = httpx2.post(f"http://{cluster.http_address}/v1/messages", json=body | more, timeout=60)
        assert answer.status_code == 200, answer.text
        return answer.json()["content"]

    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    calls = ask(messages)
    assert [call["input"] for call in calls] == [{"city": "Paris"}, {"city": "Rome"}]
    [demanded] = ask(messages, tool_choice={"type": "tool", "name": "get_weather"})
    assert demanded["type"] == "tool_use"
    results = [
        {"type": "tool_result", "tool_use_id": call["id"], "content": text}
        for call, text in zip(calls, WEATHER.values(), strict=True)
    ]
    messages += [{"role": "assistant", "content": calls}, {"role": "user", "content": results}]
    [block] = ask(messages, tool_choice={"type": "none"})
    jsonschema.validate(json.loads(block["text"]), REPORT)
