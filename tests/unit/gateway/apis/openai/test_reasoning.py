"""Reasoning in answers to chats: the official client of OpenAI reads what a scripted model writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import openai
import pytest

from services.pb import gateway_pb2
from tests.support.chats.chat_models import TOKENIZER, WEATHER, answer_tokens, prompt_text, with_chat_model
from tests.support.running_gateway import RunningGateway

USER: list[Any] = [{"role": "user", "content": "What is 2 + 2?"}]
THOUGHT = "Two and two. Stop?"
NO_REASONING = {"reasoning": None, "reasoning_content": None}
ANSWER = f"<think>\n{THOUGHT}\n</think>\n\nFour. Stop here."


async def create(api: openai.AsyncOpenAI, **options: Any) -> Any:
    return await api.chat.completions.create(model="model", messages=options.pop("messages", USER), **options)


def test_reasoning_stands_beside_the_content(tmp_path: Path) -> None:
    async def test(api: openai.AsyncOpenAI, gateway: RunningGateway) -> None:
        answer = await create(api, logprobs=True)
        message = answer.choices[0].message
        assert message.content == "Four. Stop here."
        assert message.model_extra["reasoning"] == message.model_extra["reasoning_content"] == THOUGHT
        num_tokens = len(answer_tokens(ANSWER.partition("</think>")[0] + "</think>")) - 1
        assert answer.usage.completion_tokens_details.reasoning_tokens == num_tokens
        assert answer.usage.reasoning_tokens == num_tokens, "where clients of SGLang look for it"
        assert answer.usage.completion_tokens == len(answer_tokens(ANSWER)) == len(answer.choices[0].logprobs.content)
        reasoning, content, counts = "", "", []
        async for chunk in await create(api, stream=True, stream_options={"include_usage": True}):
            counts += [chunk.usage.completion_tokens_details.reasoning_tokens] if chunk.usage else []
            for choice in chunk.choices:
                extra = choice.delta.model_extra
                assert extra.get("reasoning") == extra.get("reasoning_content")
                assert not (extra.get("reasoning") and content), "it comes before the content"
                reasoning += extra.get("reasoning") or ""
                content += choice.delta.content or ""
        assert (reasoning, content, counts) == (THOUGHT, "Four. Stop here.", [num_tokens])
        hidden = (await create(api, extra_body={"include_reasoning": False})).choices[0].message
        assert hidden.content == "Four. Stop here." and hidden.model_extra == NO_REASONING

    with_chat_model(tmp_path, "qwen3", [ANSWER], test)


def test_reasoning_may_stay_in_the_content_as_with_sglang(tmp_path: Path) -> None:
    async def test(api: openai.AsyncOpenAI, gateway: RunningGateway) -> None:
        asked: Any = {"extra_body": {"separate_reasoning": False}}
        [choice] = (await create(api, extra_body={"reasoning_format": "none"})).choices
        assert choice.message.content == ANSWER, "as with llama.cpp"
        for more in ({}, {"tools": [WEATHER]}):
            [choice] = (await create(api, **asked, **more)).choices
            assert choice.message.content == ANSWER and choice.message.model_extra == NO_REASONING
            chunks = [each.choices[0].delta async for each in await create(api, stream=True, **asked, **more)]
            assert "".join(each.content or "" for each in chunks) == ANSWER
            assert not any(each.model_extra.get("reasoning_content") for each in chunks)
        [choice] = (await create(api, extra_body={"separate_reasoning": True})).choices
        assert choice.message.reasoning_content == THOUGHT

    with_chat_model(tmp_path, "qwen3", [ANSWER], test)


@pytest.mark.parametrize("text", [ANSWER, f"<think>{THOUGHT}"])
def test_reasoning_may_come_in_one_piece(tmp_path: Path, text: str) -> None:
    async def test(api: openai.AsyncOpenAI, gateway: RunningGateway) -> None:
        for is_streamed in (True, False):
            asked = {"stream_reasoning": is_streamed}
            choices = [each.choices[0] async for each in await create(api, stream=True, n=2, extra_body=asked)]
            for index in range(2):
                deltas = [each.delta for each in choices if each.index == index]
                pieces = [each.reasoning_content for each in deltas if each.reasoning_content]
                assert "".join(pieces) == THOUGHT and (len(pieces) > 1) == is_streamed
                content = "".join(each.content or "" for each in deltas)
                assert content == ("Four. Stop here." if text == ANSWER else "")

    with_chat_model(tmp_path, "qwen3", [text], test)


@pytest.mark.parametrize("text", [ANSWER, "Four."])
@pytest.mark.parametrize("model", ["qwen3", "hermes"])
def test_reasoning_content_can_be_read_from_every_message_and_delta(tmp_path: Path, model: str, text: str) -> None:
    """The client raises `AttributeError` for a field that the server has not sent."""

    async def test(api: openai.AsyncOpenAI, gateway: RunningGateway) -> None:
        [choice] = (await create(api)).choices
        expected = THOUGHT if (model, text) == ("qwen3", ANSWER) else None
        assert choice.message.reasoning_content == choice.message.reasoning == expected
        deltas = [each.delta async for chunk in await create(api, stream=True) for each in chunk.choices]
        assert "".join(delta.reasoning_content or "" for delta in deltas) == (expected or "")

    with_chat_model(tmp_path, model, [text], test)


def test_grpc_has_the_same_reasoning(tmp_path: Path) -> None:
    async def test(api: openai.AsyncOpenAI, gateway: RunningGateway) -> None:
        request = gateway_pb2.GenerateRequest(chat=gateway_pb2.Chat(messages=USER))
        [answer] = (await gateway.stub.Generate(request)).completions
        assert (answer.reasoning, answer.text) == (THOUGHT, "Four. Stop here.")
        assert answer.finish.usage.num_reasoning_tokens > len(THOUGHT)
        chunks = [chunk async for chunk in gateway.stub.GenerateStream(request)]
        assert "".join(chunk.reasoning for chunk in chunks) == THOUGHT
        assert "".join(chunk.text for chunk in chunks) == answer.text

    with_chat_model(tmp_path, "qwen3", [ANSWER], test)


def test_a_template_may_open_or_close_the_reasoning_in_the_prompt(tmp_path: Path) -> None:
    async def opened(api: openai.AsyncOpenAI, gateway: RunningGateway) -> None:
        message = (await create(api)).choices[0].message
        assert (message.model_extra["reasoning"], message.content) == ("Two and two.", "Four.")
        message = (await create(api)).choices[0].message
        assert (message.model_extra["reasoning"], message.content) == ("Never ends", None)

    async def closed(api: openai.AsyncOpenAI, gateway: RunningGateway) -> None:
        answer = await create(api, extra_body={"chat_template_kwargs": {"enable_thinking": False}})
        message = answer.choices[0].message
        assert (message.model_extra["reasoning"], message.content) == (None, "<think>is a word")
        assert answer.usage.completion_tokens_details.reasoning_tokens == 0

    (tmp_path / "a").mkdir()
    with_chat_model(tmp_path / "a", "opens_reasoning", ["Two and two.\n</think>\n\nFour.", "Never ends"], opened)
    (tmp_path / "b").mkdir()
    dense = with_chat_model(tmp_path / "b", "qwen3", ["<think>is a word"], closed)
    assert prompt_text(dense.submits[0]).endswith("<think>\n\n</think>\n\n")


def test_stop_strings_do_not_end_the_reasoning(tmp_path: Path) -> None:
    async def test(api: openai.AsyncOpenAI, gateway: RunningGateway) -> None:
        [choice] = (await create(api, stop=["Stop"])).choices
        assert choice.message.model_extra["reasoning"] == THOUGHT
        assert (choice.message.content, choice.model_extra["stop_reason"]) == ("Four. ", "Stop")

    with_chat_model(tmp_path, "qwen3", [ANSWER], test)


def test_a_call_follows_the_reasoning(tmp_path: Path) -> None:
    call = '<tool_call>{"name": "get_weather", "arguments": {"city": "Rome"}}</tool_call>'

    async def test(api: openai.AsyncOpenAI, gateway: RunningGateway) -> None:
        [choice] = (await create(api, tools=[WEATHER])).choices
        assert choice.message.model_extra["reasoning"] == "<tool_call>no</tool_call>", "that is no call"
        assert [json.loads(each.function.arguments) for each in choice.message.tool_calls] == [{"city": "Rome"}]
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)

    with_chat_model(tmp_path, "qwen3", [f"<think><tool_call>no</tool_call></think>\n{call}"], test)


def test_the_template_gets_reasoning_and_effort(tmp_path: Path) -> None:
    for name in ("reasoning", "reasoning_content"):
        messages = [*USER, {"role": "assistant", "content": "Four.", name: "Easy."}, *USER]

        async def test(api: openai.AsyncOpenAI, gateway: RunningGateway, messages: Any = messages) -> None:
            await create(api, messages=messages, reasoning_effort="low")

        (tmp_path / name).mkdir()
        dense = with_chat_model(tmp_path / name, "qwen3", ["Four."], test)
        prompt = prompt_text(dense.submits[0])
        assert "<think>\nEasy.\n</think>\n\nFour." in prompt and prompt.endswith("(low)")


@pytest.mark.parametrize("field", ["max_reasoning_tokens", "thinking_token_budget"])
def test_a_limit_of_reasoning_reaches_the_dense_worker(field: str, tmp_path: Path) -> None:
    async def test(api: openai.AsyncOpenAI, gateway: RunningGateway) -> None:
        await create(api, extra_body={field: 7})
        await create(api, extra_body={field: 7, "chat_template_kwargs": {"enable_thinking": False}})
        if field == "thinking_token_budget":
            await create(api, extra_body={field: -1})

    dense = with_chat_model(tmp_path, "qwen3", ["Four."], test)
    begin, end = TOKENIZER.convert_tokens_to_ids(["<think>", "</think>"])
    limited, *unlimited = [submit.spec.sampling for submit in dense.submits]
    limit = limited.reasoning_limit
    assert (limit.max_tokens, limit.begin_token_id, limit.end_token_id) == (7, begin, end)
    assert not any(sampling.HasField("reasoning_limit") for sampling in unlimited)


def test_a_limit_of_reasoning_is_refused_where_it_cannot_be_kept(tmp_path: Path) -> None:
    async def test(api: openai.AsyncOpenAI, gateway: RunningGateway) -> None:
        with pytest.raises(openai.BadRequestError, match="max_reasoning_tokens is 7") as refused:
            await create(api, extra_body={"max_reasoning_tokens": 7})
        assert refused.value.param == "max_reasoning_tokens"
        with pytest.raises(openai.BadRequestError, match="they mean the same"):
            await create(api, extra_body={"max_reasoning_tokens": 7, "thinking_token_budget": 8})

    with_chat_model(tmp_path, "hermes", ["Four."], test)
