"""Every format of calls in a conversation: chosen by the chat template, read by the official client of OpenAI."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.support.chats.chat_models import TIME, WEATHER, prompt_text, with_chat_model
from tests.support.running_gateway import RunningGateway

USER: list[Any] = [{"role": "user", "content": "How is the weather in Paris?"}]
TOOLS: Any = [WEATHER, TIME]
ARGUMENTS = {"city": "Paris", "days": 3}
OBJECT = json.dumps(ARGUMENTS)
ANSWERS = {
    "hermes": f'<tool_call>\n{{"name": "get_weather", "arguments": {OBJECT}}}\n</tool_call>',
    "llama3_json": f'<|python_tag|>{{"name": "get_weather", "parameters": {OBJECT}}}',
    "mistral": f"[TOOL_CALLS]get_weather[ARGS]{OBJECT}",
    "pythonic": '<|python_start|>[get_weather(city="Paris", days=3)]<|python_end|>',
    "qwen3_coder": "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n3\n"
    "</parameter>\n</function>\n</tool_call>",
}


@pytest.mark.parametrize("name", ANSWERS)
def test_a_conversation_with_a_call(name: str, tmp_path: Path) -> None:
    async def test(api: openai.AsyncOpenAI, gateway: RunningGateway) -> None:
        [choice] = (await api.chat.completions.create(model="model", messages=USER, tools=TOOLS)).choices
        [call] = choice.message.tool_calls
        assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", ARGUMENTS)
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
        async with api.chat.completions.stream(model="model", messages=USER, tools=TOOLS) as stream:
            [streamed] = (await stream.get_final_completion()).choices
        assert streamed.message.tool_calls[0].function.arguments == call.function.arguments
        assert streamed.finish_reason == "tool_calls"
        result = {"role": "tool", "tool_call_id": call.id, "content": "rain"}
        messages: Any = [*USER, choice.message.to_dict(), result, *USER]
        [last] = (await api.chat.completions.create(model="model", messages=messages, tools=TOOLS)).choices
        assert last.message.content == "It rains."

    dense = with_chat_model(tmp_path, name, [ANSWERS[name], ANSWERS[name], "It rains."], test)
    prompt = prompt_text(dense.submits[2])
    assert prompt.count("Paris") == 3, "in two questions and in the call"
    assert "rain" in prompt


def test_other_ids_get_nine_characters_for_mistral(tmp_path: Path) -> None:
    function = {"name": "get_weather", "arguments": "{}"}
    messages: Any = [
        *USER,
        {"role": "assistant", "tool_calls": [{"id": "call_0123456789", "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": "call_0123456789", "content": "rain"},
    ]

    async def test(api: openai.AsyncOpenAI, gateway: RunningGateway) -> None:
        await api.chat.completions.create(model="model", messages=messages, tools=TOOLS)

    dense = with_chat_model(tmp_path, "mistral", ["It rains."], test)
    prompt = prompt_text(dense.submits[0])
    used = prompt.partition("[CALL_ID]")[2].partition("[ARGS]")[0]
    assert len(used) == 9 and f"[TOOL_RESULTS]{used}: rain" in prompt


REFUSALS: list[tuple[str, list[dict[str, Any]], str]] = [
    ("mistral", [{"role": "system", "content": "Be brief."}, *USER], "Only user, assistant and tool may speak."),
    (
        "llama3_json",
        [*USER, {"role": "assistant", "tool_calls": [
            {"id": i, "type": "function", "function": {"name": "get_time", "arguments": "{}"}} for i in ("1", "2")
        ]}],
        "This model calls one tool at a time!",
    ),
]


@pytest.mark.parametrize(("name", "messages", "words"), REFUSALS)
def test_a_refusal_of_the_template_is_a_400_with_its_words(
    name: str, messages: Any, words: str, tmp_path: Path
) -> None:
    async def test(api: openai.AsyncOpenAI, gateway: RunningGateway) -> None:
        with pytest.raises(openai.BadRequestError, match=words):
            await api.chat.completions.create(model="model", messages=messages, tools=TOOLS)

    with_chat_model(tmp_path, name, ["No."], test)


def test_the_configuration_chooses_another_format_or_none(tmp_path: Path) -> None:
    async def with_mistral(api: openai.AsyncOpenAI, gateway: RunningGateway) -> None:
        [choice] = (await api.chat.completions.create(model="model", messages=USER, tools=TOOLS)).choices
        assert choice.message.tool_calls[0].function.name == "get_weather"
        assert len(choice.message.tool_calls[0].id) == 9

    async def without(api: openai.AsyncOpenAI, gateway: RunningGateway) -> None:
        with pytest.raises(openai.BadRequestError, match=r"gateway\.tool_parser") as refused:
            await api.chat.completions.create(model="model", messages=USER, tools=TOOLS)
        assert refused.value.param == "tools"

    for directory, parser, test in (("a", "mistral", with_mistral), ("b", "none", without)):
        (tmp_path / directory).mkdir()
        with_chat_model(tmp_path / directory, "hermes", [ANSWERS["mistral"]], test, tool_parser=parser)
