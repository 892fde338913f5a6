"""An HTTP server that listens on a socket of others leaves it without losing who has connected."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

from starlette.types import Receive, Scope, Send

from services.common.config import GatewaySection
from services.gateway.http.envelope import fit_bodies
from services.gateway.http.server import HttpServer

TIMEOUT_S = 30.0
REQUEST = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"


async def answer_ok(scope: Scope, receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


def server_on(listener: socket.socket, announce: Callable[[], None] = lambda: None) -> HttpServer:
    """A server with a copy of the socket, as another process has it."""
    name = listener.getsockname()
    address = f"unix:{name}" if listener.family == socket.AF_UNIX else f"127.0.0.1:{name[1]}"
    section = fit_bodies(GatewaySection(http_address=address), sees_pictures=False)
    return HttpServer(
        answer_ok, section, None, (), announce=announce, shares_port=False, listener=os.dup(listener.fileno())
    )


def test_connections_before_it_leaves_are_answered_and_later_ones_wait_for_the_next_server() -> None:
    async def test() -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            address = listener.getsockname()
            first = server_on(listener)
            await first.start()
            kept_reader, kept = await asyncio.open_connection(*address)
            kept.write(REQUEST)
            assert (await kept_reader.readuntil(b"ok")).startswith(b"HTTP/1.1 200")
            new_reader, new = await asyncio.open_connection(*address)
            leaving = asyncio.create_task(first.leave(TIMEOUT_S))
            while listener_is_read(first):  # noqa: ASYNC110
                await asyncio.sleep(0)
            late_reader, late = await asyncio.open_connection(*address)
            late.write(REQUEST)
            ended, _ = await asyncio.wait({leaving}, timeout=0.1)
            assert not ended, "it waits for the request of the new connection"
            new.write(REQUEST)
            assert (await new_reader.readuntil(b"ok")).startswith(b"HTTP/1.1 200")
            await leaving
            assert await kept_reader.read() == await new_reader.read() == b"", "both are closed, the next is another's"
            await first.stop(0.0)
            assert not late_reader._buffer, "nobody has answered yet"  # type: ignore[attr-defined]
            second = server_on(listener)
            await second.start()
            assert (await late_reader.readuntil(b"ok")).startswith(b"HTTP/1.1 200")
            await second.stop(0.0)
            for each in (kept, new, late):
                each.close()

    asyncio.run(asyncio.wait_for(test(), TIMEOUT_S))


def listener_is_read(server: HttpServer) -> bool:
    return any(each.is_serving() for each in server._server.servers)


def test_who_sends_nothing_is_not_waited_for_longer_than_is_allowed() -> None:
    async def test() -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            server = server_on(listener)
            await server.start()
            reader, writer = await asyncio.open_connection(*listener.getsockname())
            await server.leave(0.05)
            assert await reader.read() == b""
            writer.close()
            await server.stop(0.0)

    asyncio.run(asyncio.wait_for(test(), TIMEOUT_S))


def test_the_file_of_a_passed_unix_socket_stays(tmp_path: Path) -> None:
    async def test() -> None:
        path = tmp_path / "http"
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(path))
            listener.listen()
            server = server_on(listener)
            assert await server.start() == f"unix:{path}"
            reader, writer = await asyncio.open_unix_connection(path)
            writer.write(REQUEST)
            assert (await reader.readuntil(b"ok")).startswith(b"HTTP/1.1 200")
            writer.close()
            await server.stop(0.0)
            assert path.exists(), "the next server is reached by it"

    asyncio.run(asyncio.wait_for(test(), TIMEOUT_S))


def test_a_request_with_a_body_is_announced_before_its_body_is_here() -> None:
    async def test() -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            announce = Mock()
            server = server_on(listener, announce)
            await server.start()
            reader, writer = await asyncio.open_connection(*listener.getsockname())
            for _ in range(2):
                writer.write(REQUEST)
                await reader.readuntil(b"ok")
            assert not announce.called
            for count in (1, 2):
                writer.write(REQUEST.replace(b"GET", b"POST").replace(b"\r\n\r\n", b"\r\nContent-Length: 2\r\n\r\n"))
                while announce.call_count < count:  # noqa: ASYNC110
                    await asyncio.sleep(0)
                writer.write(b"{}")
                await reader.readuntil(b"ok")
            assert announce.call_count == 2
            writer.close()
            await server.stop(0.0)

    asyncio.run(asyncio.wait_for(test(), TIMEOUT_S))
