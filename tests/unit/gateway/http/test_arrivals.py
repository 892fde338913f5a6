"""Many requests at once, and requests of many headers, hold the event loop only for a bounded time."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from starlette.types import Receive, Scope, Send

from services.gateway.http import protocol
from services.gateway.http.protocol import MAX_HEADERS, BoundedProtocol
from services.gateway.http.server import MAX_BEGINNINGS, Arrivals
from tests.support.clients.http_clients import connect
from tests.support.running_gateway import run, running_gateway
from tests.support.workers.fake_dense import FakeDense


def test_requests_that_come_at_once_begin_a_few_in_an_iteration_and_in_order() -> None:
    iteration, begun = 0, list[tuple[int, int]]()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        begun.append((iteration, scope["number"]))

    async def ignore(*_: object) -> None: ...

    async def test() -> None:
        nonlocal iteration
        arrivals = Arrivals(app)
        tasks = [asyncio.ensure_future(arrivals({"number": i}, ignore, ignore)) for i in range(100)]
        tasks[50].cancel()
        cancelled_later = tasks[60]
        while not all(task.done() for task in tasks):
            await asyncio.sleep(0)
            iteration += 1
            cancelled_later.cancel()
        assert [number for _, number in begun] == [i for i in range(100) if i not in (50, 60)]
        in_each = [sum(at == each for at, _ in begun) for each in range(iteration)]
        assert max(in_each) == MAX_BEGINNINGS
        begun.clear()
        await arrivals({"number": 0}, ignore, ignore)  # one alone does not wait
        assert begun == [(iteration, 0)]

    asyncio.run(test())


GET = b"GET /health HTTP/1.1\r\nhost: a\r\n"
CHUNKED = b"POST /tokenize HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    "start", [GET, CHUNKED + b'f\r\n{"prompt": "a"}\r\n0\r\n'], ids=["headers", "trailers"]
)
def test_a_request_has_a_limited_number_of_headers_and_none_beyond_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start: bytes
) -> None:
    read, on_header = list[bytes](), BoundedProtocol.on_header

    def count(connection: BoundedProtocol, name: bytes, value: bytes) -> None:
        read.append(name)
        on_header(connection, name, value)

    monkeypatch.setattr(protocol.BoundedProtocol, "on_header", count)

    async def test() -> None:
        async with running_gateway(tmp_path, FakeDense(lambda submit: [5])) as gateway:
            num_own = start.count(b": ") - start.count(b'": ')
            most = start + b"x: y\r\n" * (MAX_HEADERS - num_own) + b"\r\n"
            reader, writer = await connect(gateway.http_address)
            for _ in range(2):  # the next request of the connection may have as many
                writer.write(most)
                answer = await asyncio.wait_for(reader.readuntil(b"}"), 30)
                assert answer.startswith(b"HTTP/1.1 200 "), answer
            assert len(read) == 2 * MAX_HEADERS
            read.clear()
            writer.write(start + b"x: y\r\n" * 3000 + b"\r\n")
            answer = await asyncio.wait_for(reader.read(), 30)
            assert answer.startswith(b"HTTP/1.1 431 "), answer
            assert f"more than {MAX_HEADERS} headers".encode() in answer
            assert len(read) == MAX_HEADERS + 1
            writer.close()

    run(test())
