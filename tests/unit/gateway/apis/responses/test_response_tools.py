"""Tools, reasoning and forms of /v1/responses with the official client, and the requests that Codex sends."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import openai
import pydantic
import pytest

from tests.support.chats.chat_models import TOKENIZER, prompt_text, with_chat_model
from tests.support.running_gateway import RunningGateway

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"type": "function", "name": "get_weather", "description": "Of a city", "parameters": SCHEMA, "strict": False}
CITY = {"city": 'Paris, "Île-de-France"\n'}
PATCH = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Edits files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": 'start: "*** Begin Patch"'},
}
ASK: dict[str, Any] = {"model": "model", "input": "How is the weather in Paris?"}


def call(name: str, arguments: dict[str, Any]) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


async def ask(api: openai.AsyncOpenAI, stream: bool, **options: Any) -> tuple[Any, list[Any]]:
    """The response and, of a stream, its events."""
    if not stream:
        return await api.responses.create(**ASK | options), []
    events = [event async for event in await api.responses.create(**ASK | options, stream=True)]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    response = events[-1].response
    done = [event.item.to_dict() for event in events if event.type == "response.output_item.done"]
    assert done == [item.to_dict() for item in response.output], "the items that were sent are those of the response"
    added = [event.item.id for event in events if event.type == "response.output_item.added"]
    assert added == [item.id for item in response.output]
    return response, events


@pytest.mark.parametrize("stream", [False, True])
def test_calls_of_functions(tmp_path: Path, stream: bool) -> None:
    async def test(api: openai.AsyncOpenAI, gateway: RunningGateway) -> None:
        response, events = await ask(api, stream, tools=[WEATHER])
        text, first, second = response.output
        assert (text.type, response.output_text, response.status) == ("message", "I look.", "completed")
        assert (first.type, first.name, json.loads(first.arguments)) == ("function_call", "get_weather", CITY)
        assert (second.name, second.arguments, second.status) == ("get_weather", "{}", "completed")
        assert first.call_id != second.call_id and first.id != second.id
        assert response.tools[0].name == "get_weather" and response.tool_choice == "auto"
        pieces = [event for event in events if event.type == "response.function_call_arguments.delta"]
        if stream:
            assert "".join(event.delta for event in pieces if event.item_id == first.id) == first.arguments
            assert len([event for event in pieces if event.item_id == first.id]) > 10, "arguments arrive as they grow"
            done = [event for event in events if event.type == "response.function_call_arguments.done"]
            assert [(event.item_id, event.arguments) for event in done] == [
                (first.id, first.arguments), (second.id, second.arguments),
            ]

    with_chat_model(tmp_path, "hermes", ["I look." + call("get_weather", CITY) + call("get_weather", {})], test)


def test_the_clients_stream_helper_and_parse(tmp_path: Path) -> None:
    class Weather(pydantic.BaseModel):
        city: str

    async def test(api: openai.AsyncOpenAI, gateway: RunningGateway) -> None:
        async with api.responses.stream(**ASK, tools=[WEATHER]) as stream:
            kinds = [event.type async for event in stream]
            final = await stream.get_final_response()
        assert "response.function_call_arguments.delta" in kinds
        assert json.loads(final.output[0].arguments) == CITY
        parsed = await api.responses.parse(**ASK, text_format=Weather)
        assert parsed.output_parsed == Weather(city="Rome")

    dense = with_chat_model(tmp_path, "hermes", [call("get_weather", CITY), '{"city":"Rome"}'], test)
    assert dense.submits[1].spec.sampling.HasField("structured_output")


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_that_is_cut_off_is_incomplete(tmp_path: Path, stream: bool) -> None:
    async def test(api: openai.AsyncOpenAI, gateway: RunningGateway) -> None:
        response, _ = await ask(api, stream, tools=[WEATHER], max_output_tokens=60)
        [item] = response.output
        assert (response.status, item.status) == ("incomplete", "incomplete")
        assert json.dumps(CITY).startswith(item.arguments) and item.arguments

    with_chat_model(tmp_path, "hermes", [call("get_weather", CITY)], test)


@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_is_an_item_and_can_be_passed_back(tmp_path: Path, stream: bool) -> None:
    async def test(api: openai.AsyncOpenAI, gateway: RunningGateway) -> None:
        response, events = await ask(api, stream, include=["reasoning.encrypted_content"])
        reasoning, _ = response.output
        assert (reasoning.type, reasoning.summary) == ("reasoning", [])
        assert reasoning.content[0].text.strip() == "The sun shines."
        assert response.output_text.strip() == "Sunny."
        assert response.usage.output_tokens_details.reasoning_tokens > 10
        if stream:
            pieces = [event.delta for event in events if event.type == "response.reasoning_text.delta"]
            assert "".join(pieces) == reasoning.content[0].text
        history = [*({"role": "user", "content": "Hi"},), *(item.to_dict() for item in response.output)]
        history.append({"role": "user", "content": "And now?"})
        await ask(api, stream, input=history, reasoning={"effort": "none"})

    dense = with_chat_model(tmp_path, "qwen3", ["<think>\nThe sun shines.\n</think>\n\nSunny."], test)
    again = prompt_text(dense.submits[1])
    assert "<think>\nThe sun shines.\n</think>\n\nSunny." in again
    assert again.endswith("<think>\n\n</think>\n\n"), "effort none switches thinking off"


@pytest.mark.parametrize("stream", [False, True])
def test_codex_works(tmp_path: Path, stream: bool) -> None:
    """A request with all that Codex sends, its tools, and the next request with the outputs of the calls."""
    read = {**WEATHER, "name": "read"}
    namespace = {"type": "namespace", "name": "mcp__files", "description": "Files", "tools": [read]}
    search = {"type": "web_search", "external_web_access": False}
    tools: Any = [WEATHER, PATCH, {"type": "local_shell"}, namespace, search]
    items: list[Any] = [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Ask before you write."}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "<environment_context/>"}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Fix the bug."}]},
    ]
    options: dict[str, Any] = {
        "instructions": "You are a coding agent.",
        "tools": tools,
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"effort": "medium", "summary": "auto"},
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "0199d2b8-3f6c-7a10-8000-000000000000",
        "text": {"verbosity": "medium"},
        "extra_body": {"client_metadata": {"x-codex-installation-id": "1"}},
    }
    patch = "*** Begin Patch\n*** End Patch"
    shell = {"command": ["ls", "-l"], "timeout_ms": 1000}
    answer = call("apply_patch", {"input": patch}) + call("local_shell", shell) + call("mcp__files__read", CITY)

    async def test(api: openai.AsyncOpenAI, gateway: RunningGateway) -> None:
        response, events = await ask(api, stream, input=items, **options)
        custom, local, member = response.output
        assert (custom.type, custom.name, custom.input) == ("custom_tool_call", "apply_patch", patch)
        assert (local.type, local.action.command, local.action.timeout_ms) == ("local_shell_call", ["ls", "-l"], 1000)
        assert (member.type, member.namespace, member.name) == ("function_call", "mcp__files", "read")
        if stream:
            [delta] = [event.delta for event in events if event.type == "response.custom_tool_call_input.delta"]
            assert delta == patch
        listing = [{"type": "input_text", "text": "a.py"}]
        outputs: list[Any] = [
            {"type": "custom_tool_call_output", "call_id": custom.call_id, "output": "Done"},
            {"type": "function_call_output", "call_id": local.call_id, "output": listing},
            {"type": "function_call_output", "call_id": member.call_id, "output": "text"},
        ]
        calls = [item.to_dict() for item in response.output]
        for each in calls:
            del each["id"]  # Codex sends no ids back
        final, _ = await ask(api, stream, input=[*items, *calls, *outputs], **options)
        assert final.output_text == "Fixed."

    dense = with_chat_model(tmp_path, "hermes", [answer, "Fixed."], test)
    first, second = map(prompt_text, dense.submits)
    assert first.startswith("<|im_start|>system\nYou are a coding agent.\nAsk before you write.")
    assert "web_search" not in first and '"name": "mcp__files__read"' in first and "*** Begin Patch" in first
    assert second.startswith(first.removesuffix("<|im_start|>assistant\n")), "the prefix cache applies"
    for name, arguments in (("apply_patch", {"input": patch}), ("mcp__files__read", CITY)):
        assert f'{{"name": "{name}", "arguments": {json.dumps(arguments, ensure_ascii=False)}}}' in second
    assert second.count("<tool_response>") == 3 and "<tool_response>\na.py\n" in second


def test_only_allowed_tools_are_offered(tmp_path: Path) -> None:
    async def test(api: openai.AsyncOpenAI, gateway: RunningGateway) -> None:
        allowed = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "get_weather"}]}
        await ask(api, False, tools=[WEATHER, PATCH], tool_choice=allowed)
        await ask(api, False, tools=[WEATHER, PATCH], tool_choice="none")
        await ask(api, False, tools=[{"type": "web_search"}], tool_choice="auto")

    dense = with_chat_model(tmp_path, "hermes", ["No."], test)
    first, *others = map(prompt_text, dense.submits)
    assert "get_weather" in first and "apply_patch" not in first
    template = (tmp_path / "model" / "chat_template.jinja").read_text()
    chat = [{"role": "user", "content": ASK["input"]}]
    plain = TOKENIZER.apply_chat_template(chat, chat_template=template, add_generation_prompt=True, tokenize=False)
    assert others == [plain, plain]
