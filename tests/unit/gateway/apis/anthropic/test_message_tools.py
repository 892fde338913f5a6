"""Tools, reasoning and forms of /v1/messages, with a model that writes what the test says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import openai
import pytest
from pydantic_core import from_json

from tests.support.chats.chat_models import TOKENIZER, prompt_text, with_chat_model
from tests.support.clients.http_clients import async_client, named_events
from tests.support.running_gateway import RunningGateway

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"name": "get_weather", "description": "The weather of a city", "input_schema": SCHEMA}
TIME = {"name": "get_time", "input_schema": {"type": "object", "properties": {}}}
HI: list[Any] = [{"role": "user", "content": "How is the weather in Paris?"}]
BODY: dict[str, Any] = {"model": "model", "max_tokens": 500, "messages": HI, "tools": [WEATHER, TIME]}
CITY = {"city": 'Paris, "Île-de-France"\n'}


def call(name: str, arguments: dict[str, Any]) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


TWO = "I look." + call("get_weather", CITY) + "\n" + call("get_time", {})


async def ask(gateway: RunningGateway, body: dict[str, Any]) -> Any:
    """The whole answer, put together from events if the body asks for a stream."""
    async with async_client(gateway.http_address) as client:
        response = await client.post("/v1/messages", json=body, headers={"x-request-id": "mine"})
    assert response.status_code == 200, response.text
    return joined(named_events(response.text)) if body.get("stream") else response.json()


def joined(events: list[Any]) -> Any:
    """A message from its events, by Anthropic's description of them."""
    message: dict[str, Any] = {}
    partial = ""
    for event in events:
        kind = event["type"]
        if kind == "message_start":
            message = event["message"]
        elif kind == "content_block_start":
            assert event["index"] == len(message["content"])
            message["content"].append(event["content_block"])
            partial = ""
        elif kind == "content_block_delta":
            assert event["index"] == len(message["content"]) - 1
            block, delta = message["content"][-1], event["delta"]
            if delta["type"] == "input_json_delta":
                partial += delta["partial_json"]
            else:
                name = delta["type"].removesuffix("_delta")
                block[name] += delta[name]
        elif kind == "content_block_stop" and partial:
            message["content"][-1]["input"] = from_json(partial, allow_partial="trailing-strings")
        elif kind == "message_delta":
            message |= event["delta"] | {"usage": event["usage"]}
    assert events[-1]["type"] == "message_stop"
    return message


@pytest.mark.parametrize("stream", [False, True])
def test_calls_are_blocks(tmp_path: Path, stream: bool) -> None:
    async def test(api: openai.AsyncOpenAI, gateway: RunningGateway) -> None:
        message = await ask(gateway, BODY | {"stream": stream})
        text, weather, time = message["content"]
        assert text == {"type": "text", "text": "I look."}
        assert (weather["type"], weather["name"], weather["input"]) == ("tool_use", "get_weather", CITY)
        assert (time["type"], time["name"], time["input"]) == ("tool_use", "get_time", {})
        assert weather["id"] != time["id"]
        assert message["stop_reason"] == "tool_use"
        plain = await ask(gateway, BODY | {"stream": stream})
        assert (plain["content"], plain["stop_reason"]) == ([{"type": "text", "text": "No."}], "end_turn")

    with_chat_model(tmp_path, "hermes", [TWO, "No."], test)


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_that_is_cut_off_has_the_beginning_of_its_input(tmp_path: Path, stream: bool) -> None:
    async def test(api: openai.AsyncOpenAI, gateway: RunningGateway) -> None:
        message = await ask(gateway, BODY | {"stream": stream, "max_tokens": 65})
        [block] = message["content"]
        assert (message["stop_reason"], block["name"]) == ("max_tokens", "get_weather")
        assert block["input"]["a"] == "x"
        assert set(block["input"]["b"]) == {"y"} and len(block["input"]["b"]) < 80

    with_chat_model(tmp_path, "hermes", [call("get_weather", {"a": "x", "b": "y" * 80})], test)


def test_the_template_gets_tools_calls_and_results(tmp_path: Path) -> None:
    messages = [
        *HI,
        {
            "role": "assistant",
            "content": [
                {"type": "text", "text": "I look."},
                {"type": "tool_use", "id": "toolu_1", "name": "get_weather", "input": CITY},
                {"type": "tool_use", "id": "toolu_2", "name": "get_time", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "sunny"}]},
                {"type": "tool_result", "tool_use_id": "toolu_2", "content": "no clock", "is_error": True},
                {"type": "text", "text": "Go on."},
            ],
        },
    ]

    async def test(api: openai.AsyncOpenAI, gateway: RunningGateway) -> None:
        await ask(gateway, BODY | {"messages": messages, "system": "Be brief."})
        await ask(gateway, BODY | {"messages": messages, "tool_choice": {"type": "none"}})

    dense = with_chat_model(tmp_path, "hermes", ["It is sunny."], test)
    functions = [
        {"name": "get_weather", "description": WEATHER["description"], "parameters": SCHEMA},
        {"name": "get_time", "parameters": TIME["input_schema"]},
    ]
    tools = [{"type": "function", "function": each} for each in functions]
    chat = [
        *HI,
        {
            "role": "assistant",
            "content": "I look.",
            "tool_calls": [
                {"id": "toolu_1", "type": "function", "function": {"name": "get_weather", "arguments": CITY}},
                {"id": "toolu_2", "type": "function", "function": {"name": "get_time", "arguments": {}}},
            ],
        },
        {"role": "tool", "tool_call_id": "toolu_1", "content": "sunny"},
        {"role": "tool", "tool_call_id": "toolu_2", "content": "Error: no clock"},
        {"role": "user", "content": "Go on."},
    ]
    template = (tmp_path / "model" / "chat_template.jinja").read_text()
    options: Any = {"chat_template": template, "add_generation_prompt": True, "tokenize": False}
    with_system = [{"role": "system", "content": "Be brief."}, *chat]
    assert prompt_text(dense.submits[0]) == TOKENIZER.apply_chat_template(with_system, tools=tools, **options)
    assert prompt_text(dense.submits[1]) == TOKENIZER.apply_chat_template(chat, **options)


def test_without_parallel_calls_the_answer_ends_after_the_first(tmp_path: Path) -> None:
    async def test(api: openai.AsyncOpenAI, gateway: RunningGateway) -> None:
        choice = {"type": "auto", "disable_parallel_tool_use": True}
        message = await ask(gateway, BODY | {"tool_choice": choice})
        assert [block.get("name") for block in message["content"]] == [None, "get_weather"]
        assert message["stop_reason"] == "tool_use"

    with_chat_model(tmp_path, "hermes", [TWO], test)


@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_is_a_thinking_block(tmp_path: Path, stream: bool) -> None:
    async def test(api: openai.AsyncOpenAI, gateway: RunningGateway) -> None:
        body = {name: value for name, value in BODY.items() if name != "tools"} | {"stream": stream}
        thinking, text = (await ask(gateway, body))["content"]
        assert (thinking["type"], thinking["thinking"].strip()) == ("thinking", "The sun shines.")
        assert thinking["signature"]
        assert (text["type"], text["text"].strip()) == ("text", "Sunny.")
        earlier = [
            *HI,
            {"role": "assistant", "content": [thinking, {"type": "redacted_thinking", "data": "x"}, text]},
            {"role": "user", "content": "And now?"},
        ]
        await ask(gateway, body | {"messages": earlier, "thinking": {"type": "disabled"}})
        await ask(gateway, body | {"thinking": {"type": "enabled", "budget_tokens": 1024}})

    dense = with_chat_model(tmp_path, "qwen3", ["<think>\nThe sun shines.\n</think>\n\nSunny."], test)
    again = prompt_text(dense.submits[1])
    assert again.count("<think>") == 2
    assert again.endswith("<think>\n\n</think>\n\n"), "thinking is switched off by the template"
    assert "<think>\nThe sun shines.\n</think>\n\nSunny." in again
    assert dense.submits[2].spec.sampling.reasoning_limit.max_tokens == 1024


def test_a_budget_means_nothing_to_a_model_that_does_not_reason(tmp_path: Path) -> None:
    async def test(api: openai.AsyncOpenAI, gateway: RunningGateway) -> None:
        message = await ask(gateway, BODY | {"thinking": {"type": "enabled", "budget_tokens": 1024}})
        assert message["content"] == [{"type": "text", "text": "Sunny."}]

    with_chat_model(tmp_path, "hermes", ["Sunny."], test)


def test_instructions_in_the_middle_and_effort(tmp_path: Path) -> None:
    messages = [
        *HI,
        {"role": "assistant", "content": "Sunny."},
        {"role": "system", "content": [{"type": "text", "text": "The user is in a hurry."}]},
        {"role": "user", "content": "And now?"},
    ]

    async def test(api: openai.AsyncOpenAI, gateway: RunningGateway) -> None:
        body = {"model": "model", "max_tokens": 50, "messages": messages, "output_config": {"effort": "high"}}
        await ask(gateway, body)

    dense = with_chat_model(tmp_path, "hermes", ["No."], test)
    prompt = prompt_text(dense.submits[0])
    assert "<|im_start|>user\nThe user is in a hurry.\nAnd now?<|im_end|>" in prompt, "refused elsewhere"


def test_an_answer_of_a_schema(tmp_path: Path) -> None:
    async def test(api: openai.AsyncOpenAI, gateway: RunningGateway) -> None:
        body = {"model": "model", "max_tokens": 50, "messages": HI}
        for options in (
            {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
            {"output_format": {"type": "json_schema", "schema": SCHEMA}},
        ):
            await ask(gateway, body | options)

    dense = with_chat_model(tmp_path, "hermes", ['{"city": "Paris"}'], test)
    assert all(submit.spec.sampling.HasField("structured_output") for submit in dense.submits)
