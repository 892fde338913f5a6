"""What would be very many Python objects exists for a moment and in parts: each full collection of garbage, and each
list that is made or freed at once, keeps the event loop."""

from __future__ import annotations

import asyncio
import gc
import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from services.common.config import EMBEDDED_MODEL
from services.common.token_logprobs import TokenLogprobs
from services.gateway.apis.openai.derender_routes import GivenTop
from services.gateway.apis.openai.token_routes import BYTES_PER_TOKEN_TEXT
from services.gateway.apis.shared.request_model import RequestModel
from tests.support.clients.gateway_calls import ids, with_gateway
from tests.support.clients.http_clients import async_client
from tests.support.clients.http_gateway import CHATS, COMPLETIONS
from tests.support.running_gateway import RunningGateway
from tests.support.workers.fake_dense import FakeDense

NUM_CHATS, NUM_MESSAGES = 4, 2400
MESSAGES = [{"role": role, "content": "a"} for role in ("user", "assistant")] * (NUM_MESSAGES // 2)
NUM_CHARACTERS = 100_000


CHAT = {"messages": MESSAGES, "max_tokens": 1, "truncate_prompt_tokens": 8}
DERENDERED = {"generate_response": {"choices": [{"token_ids": [5]}]}, "chat_request": CHAT}
TOO_LONG = 400  # they cannot be cut
EMBEDDED = {"messages": MESSAGES, "truncate_prompt_tokens": 8}
ROUTES: dict[str, tuple[dict[str, Any], int]] = {  # with the status
    "/v1/chat/completions": (CHAT, 200),
    "/v1/chat/completions/batch": (CHAT | {"messages": [MESSAGES]}, 200),
    "/v1/chat/completions/input_tokens": (CHAT, 200),
    "/v1/chat/completions/render": (CHAT, 200),
    "/v1/chat/completions/derender": (DERENDERED, 200),
    "/apply-template": ({"messages": MESSAGES}, 200),
    "/tokenize": ({"messages": MESSAGES}, 200),
    "/v1/messages": ({"messages": MESSAGES, "max_tokens": 1}, TOO_LONG),
    "/v1/messages/count_tokens": ({"messages": MESSAGES}, 200),
    "/v1/messages/render": ({"messages": MESSAGES, "max_tokens": 1}, 200),
    "/v1/responses": ({"input": MESSAGES, "max_output_tokens": 1, "truncation": "auto"}, 200),
    "/v1/responses/input_tokens": ({"input": MESSAGES}, 200),
    "/api/chat": ({"messages": MESSAGES}, TOO_LONG),
    "/v2/chat": ({"messages": MESSAGES, "max_tokens": 1}, TOO_LONG),
    "/v1/embeddings": (EMBEDDED, 200),
    "/v1/embeddings?in=bytes": (EMBEDDED | {"encoding_format": "bytes"}, 200),
    "/pooling": (EMBEDDED, 200),
}


def is_message(value: object) -> bool:
    """Whether it is one of a body."""
    return isinstance(value, RequestModel) and "role" in type(value).model_fields


def is_likely_token(value: object) -> bool:
    """Whether it is one with its log-probability, as a body has it or as an answer is made of it."""
    return isinstance(value, GivenTop | TokenLogprobs)


async def most_objects(
    gateway: RunningGateway, path: str, body: dict[str, Any], status: int, is_one: Callable[[object], bool]
) -> int:
    """How many such objects there were at a time while several such requests were answered."""
    async with async_client(gateway.http_address) as client:
        body = {"model": EMBEDDED_MODEL.name} | body
        calls = [asyncio.create_task(client.post(path, json=body)) for _ in range(NUM_CHATS)]
        most = 0
        while not all(call.done() for call in calls):
            await asyncio.sleep(0.002)
            most = max(most, sum(map(is_one, gc.get_objects())))
        answers = [await call for call in calls]
        assert {each.status_code for each in answers} == {status}, answers[0].text
    return most


@pytest.mark.parametrize("path", ROUTES)
def test_of_many_long_chats_that_arrive_together_the_messages_of_two_exist_at_a_time(
    tmp_path: Path, path: str
) -> None:
    async def test(gateway: RunningGateway) -> None:
        assert NUM_MESSAGES <= await most_objects(gateway, path, *ROUTES[path], is_message) <= 2 * NUM_MESSAGES

    with_gateway(tmp_path, FakeDense(lambda submit: [5]), test, runner="pooling")


@pytest.mark.parametrize(("path", "field"), [(CHATS, "generate_response"), (COMPLETIONS, "generate_responses")])
def test_the_likely_tokens_of_derendered_answers_are_no_objects(tmp_path: Path, path: str, field: str) -> None:
    token = {"token": "token_id:70", "logprob": -1.0}
    content = [token | {"top_logprobs": [token] * 20}] * 200
    given = {"choices": [{"token_ids": [70], "logprobs": {"content": content}}] * 2}
    body = {field: given if path == CHATS else [given]}

    async def test(gateway: RunningGateway) -> None:
        assert await most_objects(gateway, f"{path}/derender", body, 200, is_likely_token) <= 100

    with_gateway(tmp_path, FakeDense(lambda submit: [5]), test)


def test_the_schemas_of_tools_are_no_objects_while_a_response_grows(tmp_path: Path) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "object", "properties": {}, "x-mark": {}}}}
    tools = [{"type": "function", "name": f"f{i}", "parameters": schema} for i in range(100)]

    def num_schemas() -> int:
        return sum(type(each) is dict and "x-mark" in each for each in gc.get_objects())

    async def test(gateway: RunningGateway) -> None:
        body = {"input": "Hi", "tools": tools, "tool_choice": "none", "stream": True, "truncation": "auto"}
        content = json.dumps(body | {"max_output_tokens": 4})
        own, found = num_schemas(), []
        headers = {"content-type": "application/json"}
        async with (
            async_client(gateway.http_address) as client,
            client.stream("POST", "/v1/responses", content=content, headers=headers) as stream,
        ):
            async for line in stream.aiter_lines():
                if line.startswith("event: response.output_text.delta"):
                    found.append(num_schemas() - own)
                elif line.startswith("data: "):
                    last = line
        given = json.loads(last.removeprefix("data: "))["response"]["tools"]
        assert [each["parameters"] for each in given] == [schema] * len(tools)
        assert found and not any(found)

    with_gateway(tmp_path, FakeDense(lambda submit: ids(" one two three four")), test)


def test_tokens_with_their_places_take_no_more_memory_than_is_reserved_for_them(tmp_path: Path) -> None:
    async def test(gateway: RunningGateway) -> None:
        text = ("San Francisco, " * NUM_CHARACTERS)[:NUM_CHARACTERS]
        async with async_client(gateway.http_address) as client:
            await client.post("/tokenize", json={"inputs": text[:100]})
            tracemalloc.start()
            answer = await client.post("/tokenize", json={"inputs": text})
            _, most = tracemalloc.get_traced_memory()
            tracemalloc.stop()
        tokens = json.loads(answer.content)
        assert "".join(each["text"] for each in tokens if not each["special"]) == text
        assert most <= BYTES_PER_TOKEN_TEXT * len(tokens)

    with_gateway(tmp_path, FakeDense(lambda submit: [5], max_model_len=NUM_CHARACTERS), test)
