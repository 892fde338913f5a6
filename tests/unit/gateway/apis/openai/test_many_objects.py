"""What would be very many Python objects exists for a moment and in parts: each full collection of garbage, and each
list that is made or freed at once, keeps the event loop."""

from __future__ import annotations

import asyncio
import gc
import json
import tracemalloc
from pathlib import Path

from services.gateway.apis.openai.chat_schema import ChatMessageObject
from services.gateway.apis.openai.token_routes import BYTES_PER_TOKEN_TEXT
from tests.support.clients.gateway_calls import with_gateway
from tests.support.clients.http_clients import async_client
from tests.support.running_gateway import RunningGateway
from tests.support.workers.fake_dense import FakeDense

NUM_CHATS, NUM_MESSAGES = 6, 2400
MESSAGES = [{"role": role, "content": "a"} for role in ("user", "assistant")] * (NUM_MESSAGES // 2)
NUM_CHARACTERS = 100_000


def test_of_many_long_chats_that_arrive_together_the_messages_of_two_exist_at_a_time(tmp_path: Path) -> None:
    async def test(gateway: RunningGateway) -> None:
        body = {"messages": MESSAGES, "max_tokens": 1, "truncate_prompt_tokens": 8}
        async with async_client(gateway.http_address) as client:
            calls = [asyncio.create_task(client.post("/v1/chat/completions", json=body)) for _ in range(NUM_CHATS)]
            most = 0
            while not all(call.done() for call in calls):
                await asyncio.sleep(0.002)
                most = max(most, sum(isinstance(each, ChatMessageObject) for each in gc.get_objects()))
            assert {(await call).status_code for call in calls} == {200}
        assert NUM_MESSAGES <= most <= 2 * NUM_MESSAGES

    with_gateway(tmp_path, FakeDense(lambda submit: [5]), test)


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
