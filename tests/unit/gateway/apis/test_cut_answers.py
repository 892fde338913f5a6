"""Answers that `max_tokens` cuts off within a call: the same in whole answers and in streams of every protocol."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.support.chats.chat_models import TIME, WEATHER, answer_tokens, with_chat_model
from tests.support.running_gateway import RunningGateway

MESSAGES: list[Any] = [{"role": "user", "content": "How is the weather in Paris?"}]
ANSWERS = {
    "hermes": '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Saint-Étienne"}}\n</tool_call>',
    "llama3_json": '{"name": "get_weather", "parameters": {"city": "Saint-Étienne"}}',
    "mistral": '[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Saint-Étienne"}}]',
    "pythonic": "[get_weather(city='Saint-Étienne')]",
    "qwen3_coder": "<tool_call>\n<function=get_weather>\n<parameter=city>\nSaint-Étienne\n</parameter>\n</function>",
}


def num_tokens(answer: str, part: str) -> int:
    """Tokens of the answer up to the end of `part`; the tokenizer has one for each byte or marker."""
    end = answer.index(part) + len(part)
    return len(answer_tokens(answer[:end])) - 1


@pytest.mark.parametrize("name", ANSWERS)
def test_chats(tmp_path: Path, name: str) -> None:
    answer = ANSWERS[name]

    async def test(api: openai.AsyncOpenAI, gateway: RunningGateway) -> None:
        for part, arguments in (
            ("get_weat", None), ("Saint-", '{"city": "Saint-'), ("Saint-Ét", '{"city": "Saint-Ét'),
        ):  # fmt: skip
            options: Any = {
                "model": "model", "messages": MESSAGES, "tools": [WEATHER, TIME], "max_tokens": num_tokens(answer, part)
            }  # fmt: skip
            [choice] = (await api.chat.completions.create(**options)).choices
            chunks = [chunk async for chunk in await api.chat.completions.create(**options, stream=True)]
            deltas = [chunk.choices[0].delta for chunk in chunks]
            content = "".join(delta.content or "" for delta in deltas)
            pieces = [piece.function for delta in deltas for piece in delta.tool_calls or ()]
            assert choice.finish_reason == chunks[-1].choices[0].finish_reason == "length"
            assert (choice.message.content or "") == content
            if arguments is None:
                assert choice.message.tool_calls is None and not pieces
                assert answer.startswith(content) and content.endswith("get_weat")
            else:
                [call] = choice.message.tool_calls
                assert (call.function.name, call.function.arguments, content) == ("get_weather", arguments, "")
                assert [piece.name for piece in pieces if piece.name] == ["get_weather"]
                assert "".join(piece.arguments or "" for piece in pieces) == arguments

    with_chat_model(tmp_path, name, [answer], test)


def test_the_text_of_a_custom_tool(tmp_path: Path) -> None:
    answer = f'<tool_call>{json.dumps({"name": "patch", "arguments": {"input": "*** Begin Patch"}})}</tool_call>'

    async def test(api: openai.AsyncOpenAI, gateway: RunningGateway) -> None:
        options: Any = {
            "model": "model", "input": "Mend it.", "tools": [{"type": "custom", "name": "patch"}],
            "max_output_tokens": num_tokens(answer, "*** Beg"),
        }  # fmt: skip
        whole = await api.responses.create(**options)
        events = [event async for event in await api.responses.create(**options, stream=True)]
        for response in (whole, events[-1].response):
            [item] = response.output
            assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
            assert (item.type, item.input, item.to_dict()["status"]) == ("custom_tool_call", "*** Beg", "incomplete")

    with_chat_model(tmp_path, "hermes", [answer], test)
