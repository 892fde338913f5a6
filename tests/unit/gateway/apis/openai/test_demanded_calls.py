"""`tool_choice` required or a tool, and `strict`: the dense worker gets a grammar, the client the call."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import openai
import pytest

from services.pb import gateway_pb2
from tests.support.chats.chat_models import TIME, WEATHER, with_chat_model
from tests.support.running_gateway import RunningGateway

USER: list[Any] = [{"role": "user", "content": "How is the weather in Paris?"}]
TOOLS: Any = [WEATHER, TIME]
NAMED: Any = {"type": "function", "function": {"name": "get_weather"}}
STRICT: Any = [{"type": "function", "function": WEATHER["function"] | {"strict": True}}, TIME]
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'


def test_a_demanded_call_has_a_grammar(tmp_path: Path) -> None:
    async def test(api: openai.AsyncOpenAI, gateway: RunningGateway) -> None:
        reasons = []
        for options in ({"tool_choice": "required"}, {"tool_choice": NAMED}, {"tools": STRICT}, {}):
            given: Any = {"model": "model", "messages": USER, "tools": TOOLS} | options
            [choice] = (await api.chat.completions.create(**given)).choices
            [call] = choice.message.tool_calls
            assert choice.message.content == (None if options.get("tool_choice") is None else ""), "as with vLLM"
            assert json.loads(call.function.arguments) == {"city": "Paris"}
            async with api.chat.completions.stream(**given) as stream:
                [streamed] = (await stream.get_final_completion()).choices
            assert streamed.message.tool_calls[0].function.arguments == call.function.arguments
            assert streamed.finish_reason == choice.finish_reason
            reasons.append(choice.finish_reason)
        assert reasons == ["tool_calls", "stop", "tool_calls", "tool_calls"], "as OpenAI has it"
        chat = gateway_pb2.Chat(messages=USER, tools=json.dumps(TOOLS), tool_choice="function:get_weather")
        [answer] = (await gateway.stub.Generate(gateway_pb2.GenerateRequest(chat=chat))).completions
        assert answer.tool_calls[0].name == "get_weather"
        any_call: Any = "any"  # Mistral's word for required
        await api.chat.completions.create(model="model", messages=USER, tools=TOOLS, tool_choice=any_call)

    dense = with_chat_model(tmp_path, "hermes", [CALL], test)
    required, _, named, _, strict, _, free, _, over_grpc, mistral = [submit.spec.sampling for submit in dense.submits]
    assert mistral.structured_output == required.structured_output
    assert "get_time" in required.structured_output.grammar
    assert "get_weather" in named.structured_output.grammar and "get_time" not in named.structured_output.grammar
    assert '"city"' in strict.structured_output.grammar
    assert not free.HasField("structured_output")
    assert over_grpc.structured_output == named.structured_output


@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
@pytest.mark.parametrize("num_tokens", [1, 3, 6])
def test_the_beginning_of_a_demanded_call_is_no_content(num_tokens: int, choice: Any, tmp_path: Path) -> None:
    """A limit cuts it off before the name of the tool is known."""

    async def test(api: openai.AsyncOpenAI, gateway: RunningGateway) -> None:
        given: Any = {"model": "model", "messages": USER, "tools": TOOLS, "tool_choice": choice}
        given["max_tokens"] = num_tokens
        [whole] = (await api.chat.completions.create(**given)).choices
        assert (whole.message.content, whole.message.tool_calls, whole.finish_reason) == ("", None, "length")
        events = [each.choices[0] async for each in await api.chat.completions.create(**given, stream=True)]
        assert not any(each.delta.content or each.delta.tool_calls for each in events)
        assert events[-1].finish_reason == "length"
        free = given | {"tool_choice": "auto"}
        assert (await api.chat.completions.create(**free)).choices[0].message.content.startswith("<")

    with_chat_model(tmp_path, "hermes", [CALL], test)


BAD = {"properties": {"a": {"pattern": "("}}}
BAD_TOOL: Any = {"type": "function", "function": {"name": "find_it", "parameters": BAD}}
NEGATION = {"properties": {"a": {"type": "string", "not": {"const": "b"}}}}
STRICT_TOOL: Any = {"type": "function", "function": {"name": "find_it", "parameters": NEGATION, "strict": True}}
REFUSED: list[tuple[dict[str, Any], str, str]] = [
    (
        {"tool_choice": {"type": "function", "function": {"name": "get_news"}}},
        "tool_choice",
        "'get_news', which is not one of the tools: get_weather, get_time$",
    ),
    (
        {"tools": [WEATHER, TIME, BAD_TOOL], "tool_choice": "required"},
        "tools[2].function.parameters",
        "the parameters of the tool 'find_it' cannot be enforced: regex parse",
    ),
    ({"tools": [TIME, STRICT_TOOL]}, "tools[1].function.parameters", r"'find_it' cannot be enforced: .*\[.*not.*\]"),
    ({"tools": [], "tool_choice": "required"}, "tool_choice", "there are no tools"),
    ({"tool_choice": "always"}, "tool_choice", "'always'"),
    ({"tool_choice": {"type": "function"}}, "tool_choice.function", "required"),
    ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice.type", "'allowed_tools'"),
]


def test_what_cannot_be_demanded_is_refused(tmp_path: Path) -> None:
    async def test(api: openai.AsyncOpenAI, gateway: RunningGateway) -> None:
        for options, param, words in REFUSED:
            given: Any = {"model": "model", "messages": USER, "tools": TOOLS} | options
            with pytest.raises(openai.BadRequestError, match=words) as refused:
                await api.chat.completions.create(**given)
            assert refused.value.param == param
            assert "%json" not in str(refused.value) and "x-guidance" not in str(refused.value), "it shows our grammar"

    with_chat_model(tmp_path, "hermes", [CALL], test)


def test_an_answer_with_a_form_may_come_after_reasoning(tmp_path: Path) -> None:
    async def test(api: openai.AsyncOpenAI, gateway: RunningGateway) -> None:
        given: Any = {"model": "model", "messages": USER, "response_format": {"type": "json_object"}}
        message = (await api.chat.completions.create(**given)).choices[0].message
        assert (message.model_extra["reasoning"], message.content) == ("Paris.", '{"sun": true}')

    dense = with_chat_model(tmp_path, "opens_reasoning", ['Paris.\n</think>\n\n{"sun": true}'], test)
    grammar = dense.submits[0].spec.sampling.structured_output.grammar
    assert "TEXT <[" in grammar, "free text up to the token that ends the reasoning"
