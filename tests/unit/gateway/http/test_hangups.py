"""Waits in which nothing of a connection is read."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from starlette.requests import ClientDisconnect

from services.gateway.http.connection import Connection, Hangups
from tests.support.running_gateway import run


def test_a_wait_that_begins_after_the_end_of_the_connection_ends_as_others_do(tmp_path: Path) -> None:
    async def body() -> None:
        loop = asyncio.get_running_loop()
        made = loop.create_future()

        class Protocol(asyncio.Protocol):
            def connection_made(self, transport: asyncio.BaseTransport) -> None:
                made.set_result(transport)

        server = await loop.create_unix_server(Protocol, str(tmp_path / "socket"))
        _, writer = await asyncio.open_unix_connection(str(tmp_path / "socket"))
        transport = await made
        transport.abort()
        await asyncio.sleep(0.01)
        with pytest.raises(ClientDisconnect), Connection(transport, Hangups()).reads_nothing():
            pass
        writer.close()
        server.close()

    run(body())
