"""A gateway with a scripted dense worker, and an HTTP client of it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import httpx2

from services.common.config import EMBEDDED_MODEL
from services.pb import dense_pb2
from tests.support.clients.gateway_calls import ids
from tests.support.clients.http_clients import async_client
from tests.support.running_gateway import RunningGateway, run, running_gateway
from tests.support.workers.fake_dense import FakeDense

MODEL = EMBEDDED_MODEL.name
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
USER = [{"role": "user", "content": "Hi"}]
PROMPT = {"prompt": "a"}  # a body for completions
CHAT = {"messages": USER}
Test = Callable[[httpx2.AsyncClient, RunningGateway], Awaitable[None]]


def say(*texts: str) -> Callable[[dense_pb2.Submit], Sequence[int]]:
    """A script: the same tokens for every request."""
    token_ids = [token_id for text in texts for token_id in ids(text)]
    return lambda submit: token_ids


def with_client(tmp_path: Path, dense: FakeDense | None, test: Test, **options: Any) -> None:
    """Runs `test` against a gateway."""

    async def body() -> None:
        async with running_gateway(tmp_path, dense, **options) as gateway, async_client(gateway.http_address) as client:
            await test(client, gateway)

    run(body())


def answers_to(
    directory: Path, dense: FakeDense, url: str, bodies: Sequence[Any], **options: Any
) -> list[httpx2.Response]:
    """What one gateway answers to these bodies, one after the other."""
    found: list[httpx2.Response] = []

    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        found.extend([await client.post(url, json=body) for body in bodies])

    with_client(directory, dense, test, **options)
    return found


def check_error(response: httpx2.Response, status: int, param: str | None, *words: str) -> None:
    """Checks that the response contains a whole error object with the request's id."""
    assert response.status_code == status, response.text
    assert response.headers["x-request-id"]
    assert response.headers["content-type"] == "application/json"
    assert response.json().keys() == {"error"}
    error = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["type"] == ("server_error" if status >= 500 else "invalid_request_error")
    assert error["param"] == param, error
    assert error["code"]
    for word in words:
        assert word in error["message"]
    assert len(error["message"]) < 500
