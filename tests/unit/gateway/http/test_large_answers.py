"""A large answer is written as its client reads it: until then the application, which counts its memory, goes on."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import uvicorn
from uvicorn.server import ServerState

from services.gateway.http.protocol import MAX_WRITTEN_BYTES
from tests.support.running_gateway import run, until
from tests.unit.gateway.http.test_parsing_in_pieces import Connection, FakeTransport

GET = "GET / HTTP/1.%d\r\nHost: a\r\n\r\n"
BODY = bytes(range(256)) * 2**12  # a megabyte
SIZES = (0, 1, MAX_WRITTEN_BYTES, MAX_WRITTEN_BYTES + 1, 2 * MAX_WRITTEN_BYTES, len(BODY))


class UnreadTransport(FakeTransport):
    """Its client reads what was written when the test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.num_unread, self.most_unread = 0, 0
        self.connection: Connection

    def write(self, data: bytes | bytearray | memoryview) -> None:
        super().write(data)
        self.num_unread += len(data)
        self.most_unread = max(self.most_unread, self.num_unread)
        if self.num_unread > MAX_WRITTEN_BYTES:
            self.connection.pause_writing()

    def read_all(self) -> None:
        self.num_unread = 0
        self.connection.resume_writing()


@pytest.mark.parametrize("version", [0, 1])
@pytest.mark.parametrize("has_length", [False, True])
@pytest.mark.parametrize("num_bytes", SIZES)
def test_the_application_ends_when_its_client_has_read(version: int, has_length: bool, num_bytes: int) -> None:
    body, has_ended = BODY[:num_bytes], False

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        nonlocal has_ended
        headers = [(b"content-length", b"%d" % num_bytes)] if has_length else []
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})
        has_ended = True

    async def test() -> None:
        config = uvicorn.Config(answer, http=Connection, interface="asgi3", log_level="warning", access_log=False)
        config.load()
        transport = UnreadTransport()
        transport.connection = Connection(config, ServerState(), {})
        transport.connection.connection_made(transport)
        transport.connection.data_received((GET % version).encode())
        num_reads = 0
        while not has_ended:
            await until(lambda: has_ended or transport.num_unread > MAX_WRITTEN_BYTES)
            if not has_ended:
                transport.read_all()
                num_reads += 1
        assert num_reads >= num_bytes // (2 * MAX_WRITTEN_BYTES) - 1
        assert transport.most_unread <= 2 * MAX_WRITTEN_BYTES + 1000, "the buffer's limit, a piece, and headers"
        head, _, rest = transport.written.partition(b"\r\n\r\n")
        if b"transfer-encoding: chunked" in head:
            found = b""
            while rest:
                size, _, rest = rest.partition(b"\r\n")
                found, rest = found + rest[: int(size, 16)], rest[int(size, 16) + 2 :]
            rest = found
        assert rest == body
        transport.connection.connection_lost(None)
        await asyncio.sleep(0)

    run(test())
