"""One client cannot take all connections from others."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.support.cluster import free_port
from tests.support.running_gateway import run, running_gateway
from tests.support.workers.fake_dense import FakeDense

MOST = 64
HEALTH = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"


@pytest.mark.parametrize(("proxies", "num_of_one"), [((), 56), (("127.0.0.1",), 64)], ids=["a client", "a proxy"])
def test_the_last_eighth_of_connections_is_kept_for_clients_with_few(
    tmp_path: Path, proxies: tuple[str, ...], num_of_one: int
) -> None:
    port = free_port()

    async def connect(source: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", port, local_addr=(source, 0))

    async def ask(source: str) -> bytes:
        """The answer on a new connection, which is closed then."""
        reader, writer = await connect(source)
        writer.write(HEALTH)
        answer = await reader.readuntil(b"}")
        writer.close()
        return answer

    async def body() -> None:
        limits = {"max_connections": MOST, "trusted_proxies": proxies, "header_timeout_s": 90.0}
        async with running_gateway(tmp_path, FakeDense(lambda _: []), http_address=f"127.0.0.1:{port}", **limits):
            idle = [await connect("127.0.0.1") for _ in range(num_of_one)]
            refused = await ask("127.0.0.1")
            assert refused.startswith(b"HTTP/1.1 503 ") and b"too_many_connections" in refused
            if not proxies:
                assert b"this client has 56 of 56 connections (gateway.max_connections); with 1 more" in refused
                assert b"a proxy with many clients belongs into gateway.trusted_proxies" in refused
            other = await ask("127.0.0.2")
            assert (b"there are 64 connections, the limit (gateway.max_connections)" in other) == bool(proxies)
            for _, writer in idle:
                writer.close()
            while b"too_many_connections" in await ask("127.0.0.1"):
                pass

    run(body())
