"""Requests that wait for an earlier one of their connection stay bytes, and do not run out of time."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import uvicorn
from uvicorn.server import ServerState

from services.gateway.http.protocol import MAX_PIECE_BYTES
from tests.support.running_gateway import run, until
from tests.unit.gateway.http.test_parsing_in_pieces import Connection, FakeTransport

NUM_REQUESTS = 3000
LIMITS = {"header_timeout_s": 0.05, "body_timeout_s": 0.05}
POST = b"POST /%d HTTP/1.1\r\nHost: a\r\nContent-Length: 1000\r\n\r\n" + b"b" * 1000
GET = b"GET /%d HTTP/1.1\r\nHost: a\r\n\r\n"


@pytest.mark.parametrize("request_bytes", [GET, POST])
def test_few_of_thousands_of_requests_are_objects_before_their_turn(request_bytes: bytes) -> None:
    paths, most_waiting, may_answer = list[str](), 0, asyncio.Event()

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        nonlocal most_waiting
        while (await receive()).get("more_body"):
            pass
        await may_answer.wait()
        paths.append(scope["path"])
        most_waiting = max(most_waiting, len(connection.pipeline))
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})

    async def test() -> None:
        nonlocal connection
        config = uvicorn.Config(answer, http=Connection, interface="asgi3", log_level="warning", access_log=False)
        config.load()
        connection, transport = Connection(config, ServerState(), {}), FakeTransport()
        connection.section = Connection.section.model_copy(update=LIMITS)
        connection.connection_made(transport)
        connection.data_received(b"".join([request_bytes % i for i in range(NUM_REQUESTS)]))
        await until(lambda: bool(connection.pipeline))
        await asyncio.sleep(0.5)  # for longer than the rest of a request may take to come
        assert transport.is_paused and not transport.is_closed
        may_answer.set()
        await until(lambda: len(paths) == NUM_REQUESTS)
        assert paths == [f"/{i}" for i in range(NUM_REQUESTS)]
        assert most_waiting <= MAX_PIECE_BYTES // len(GET) + 1
        await until(lambda: transport.written.count(b"HTTP/1.1 200 OK") == NUM_REQUESTS)
        assert not transport.is_paused
        connection.connection_lost(None)
        await asyncio.sleep(0)

    connection: Connection
    run(test())
