"""What one read brings is parsed in pieces, so that many connections do not keep the event loop."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import uvicorn
from uvicorn.server import ServerState

from services.common.config import GatewaySection
from services.gateway.access.client_address import ClientAddresses
from services.gateway.http import protocol
from services.gateway.http.connection import Hangups
from services.gateway.http.protocol import BoundedProtocol
from tests.support.running_gateway import run, until

CHUNKED = b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"


class Connection(BoundedProtocol):
    section = GatewaySection()
    hangups = Hangups()
    addresses = ClientAddresses()
    num_of: ClassVar[Counter[str]] = Counter()


class FakeTransport(asyncio.Transport):
    """Keeps what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.written, self.is_paused, self.is_closed = b"", False, False

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default

    def get_write_buffer_size(self) -> int:
        return 0

    def is_closing(self) -> bool:
        return self.is_closed

    def close(self) -> None:
        self.is_closed = True

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written += bytes(data)

    def pause_reading(self) -> None:
        self.is_paused = True

    def resume_reading(self) -> None:
        self.is_paused = False


class Received:
    """An application that keeps the bodies, and a connection to it."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        config = uvicorn.Config(self._answer, http=Connection, interface="asgi3", log_level="warning", access_log=False)
        config.load()
        self.connection, self.transport = Connection(config, ServerState(), {}), FakeTransport()
        self.connection.connection_made(self.transport)

    async def _answer(self, scope: Any, receive: Any, send: Any) -> None:
        body, is_complete = b"", False
        while not is_complete:
            message = await receive()
            body += message.get("body", b"")
            is_complete = not message.get("more_body", False)
        self.bodies.append(body)
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})

    async def wait(self, num_bodies: int) -> None:
        await until(lambda: len(self.bodies) == num_bodies and not self.connection._rest)


def chunks(body: bytes, sizes: list[int]) -> bytes:
    """The body in chunks of these sizes in turn."""
    parts, start, number = [], 0, 0
    while start < len(body):
        part = body[start : start + sizes[number % len(sizes)]]
        parts.append(b"%x\r\n%s\r\n" % (len(part), part))
        start, number = start + len(part), number + 1
    return b"".join(parts) + b"0\r\n\r\n"


@pytest.mark.parametrize("sizes", [[1], [7, 1, 4000], [5000]])
@pytest.mark.parametrize("read_bytes", [100, 3000, 65_536])
def test_bodies_arrive_whole_however_they_are_sent(sizes: list[int], read_bytes: int) -> None:
    bodies = [random.Random(number).randbytes(20_000 + number) for number in range(3)]
    plain = b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n%s" % (len(bodies[1]), bodies[1])
    sent = CHUNKED + chunks(bodies[0], sizes) + plain + CHUNKED + chunks(bodies[2], sizes)

    async def test() -> None:
        received = Received()
        for start in range(0, len(sent), read_bytes):
            await until(lambda: not received.transport.is_paused)
            received.connection.data_received(sent[start : start + read_bytes])
        await received.wait(3)
        assert received.bodies == bodies
        assert received.transport.written.count(b"200 OK") == 3 and not received.transport.is_paused

    run(test())


@pytest.mark.parametrize("start", [CHUNKED, b""])
def test_others_have_their_turn_between_pieces_of_what_one_read_brings(
    monkeypatch: pytest.MonkeyPatch, start: bytes
) -> None:
    """Chunks of a byte, or requests without a body."""
    clock, fed = [1.0], list[int]()

    class Slow(Received):
        def __init__(self) -> None:
            super().__init__()
            parse = self.connection._parse

            def parse_slowly(data: bytes) -> None:
                clock[0] += len(data) * 1e-7
                fed.append(len(data))
                parse(data)

            monkeypatch.setattr(self.connection, "_parse", parse_slowly)

    async def test() -> None:
        received, turns = Slow(), list[int]()
        monkeypatch.setattr(protocol, "time", SimpleNamespace(thread_time=lambda: clock[0]))
        received.connection.data_received(start)
        fed.clear()
        part = b"1\r\n \r\n" if start else b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"
        sent = part * (60_000 // len(part))
        received.connection.data_received(sent)
        while received.connection._rest:
            assert received.transport.is_paused
            turns.append(sum(fed))
            fed.clear()
            await asyncio.sleep(0)
        assert sum(turns) + sum(fed) == len(sent)
        assert len(turns) >= 20 and max(turns) <= 2 * protocol.MAX_PIECE_BYTES
        assert not received.transport.is_paused or not start

    run(test())


def test_nothing_more_is_parsed_of_a_connection_that_is_lost() -> None:
    async def test() -> None:
        received = Received()
        received.connection.data_received(CHUNKED + b"1\r\n \r\n" * 30_000)
        received.connection.connection_lost(None)
        assert not received.connection._rest
        await asyncio.sleep(0.01)

    run(test())
