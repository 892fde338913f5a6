"""The requests of serving benchmarks such as `vllm bench serve`, sent and read as such a program does.

It sends text, ignores EOS, reads bytes as they come, and believes the counts of usage in the last chunk.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import pytest

from services.common.config import EMBEDDED_MODEL
from tests.support.clients.gateway_calls import EOS, ids, text_of
from tests.support.clients.http_gateway import with_client
from tests.support.running_gateway import RunningGateway
from tests.support.workers.fake_dense import FakeDense

PROMPT = "Tell me about cities"
TOKEN_IDS = [*ids(" Łódź, 東京"), EOS, *ids(" 🙂 and others")]
SAMPLING = {"temperature": 0.0, "repetition_penalty": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0}
COMMON = {"model": EMBEDDED_MODEL.name, "stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": PROMPT, "max_tokens": len(TOKEN_IDS), "logprobs": None},
    "/v1/chat/completions": {
        "messages": [{"role": "user", "content": [{"type": "text", "text": PROMPT}]}],
        "max_completion_tokens": len(TOKEN_IDS),
    },
}


@dataclass
class Output:
    """What a benchmark notes about one request."""

    text: str = ""
    num_pieces: int = 0
    usage: dict[str, Any] = field(default_factory=dict)
    is_done: bool = False


async def messages_of(pieces: AsyncIterator[bytes]) -> AsyncIterator[str]:
    """The data of server-sent events from pieces of any size; an event may be cut anywhere, also within a character."""
    rest = b""
    async for piece in pieces:
        *events, rest = (rest + piece).split(b"\n\n")
        for event in events:
            data = event.strip().decode()
            if not data.startswith(":"):  # a comment, which keeps the connection alive
                assert data.startswith("data: "), data
                yield data.removeprefix("data: ")
    assert not rest, "the last event is complete"


async def cut(response: httpx2.Response, size: int) -> AsyncIterator[bytes]:
    async for piece in response.aiter_bytes():
        for start in range(0, len(piece), size):
            yield piece[start : start + size]


async def send(client: httpx2.AsyncClient, path: str, body: dict[str, Any], size: int) -> Output:
    """One request, whose answer is read in pieces of at most `size` bytes."""
    output = Output()
    async with client.stream("POST", path, json=body) as response:
        assert response.status_code == 200, await response.aread()
        async for message in messages_of(cut(response, size)):
            assert not output.is_done, "nothing follows [DONE]"
            if message == "[DONE]":
                output.is_done = True
                continue
            event = json.loads(message)
            if choices := event["choices"]:
                piece = choices[0].get("text") or choices[0].get("delta", {}).get("content") or ""
                output.text += piece
                output.num_pieces += bool(piece)
            elif event.get("usage"):
                output.usage = event["usage"]
    return output


@pytest.mark.parametrize("size", [1, 7, 65536])
@pytest.mark.parametrize("path", BODIES)
def test_a_benchmark_counts_every_token(tmp_path: Path, path: str, size: int) -> None:
    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        for sampling in ({"temperature": 0.0}, SAMPLING):
            output = await send(client, path, {**COMMON, **BODIES[path], **sampling}, size)
            assert output.is_done
            assert output.text == text_of(TOKEN_IDS)
            assert output.usage["completion_tokens"] == len(TOKEN_IDS), "EOS does not end it"
            assert output.usage["total_tokens"] == output.usage["prompt_tokens"] + len(TOKEN_IDS)
            assert 1 <= output.num_pieces <= len(TOKEN_IDS)

    dense = FakeDense(lambda submit: TOKEN_IDS)
    with_client(tmp_path, dense, test)
    assert all(EOS not in submit.spec.stop_token_ids for submit in dense.submits)
