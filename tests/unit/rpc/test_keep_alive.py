"""Keep-alive pings: servers take them for as long as a call is silent, and a peer that vanishes is noticed."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.rpc import client, server
from services.rpc.server import GrpcServer
from tests.support.running_gateway import run, until

PING, IS_ACK = 6, 1  # RFC 9113, section 6.7
INTERVAL_MS = 1000  # gRPC pings no more often
BOUND_S = 30.0  # gRPC's own timeout of a ping is a minute, as is its interval after two of them


class Wire:
    """A TCP proxy before a server at a Unix socket. It counts the pings, and can become silent without an end."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._tasks = set[asyncio.Task[None]]()
        self.num_pings = 0
        self.is_cut = False

    async def start(self) -> int:
        """Returns the port."""
        listener = await asyncio.start_server(self._connect, "127.0.0.1", 0)
        return int(listener.sockets[0].getsockname()[1])

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        server_reader, server_writer = await asyncio.open_unix_connection(self._path)
        await asyncio.gather(self._requests(reader, server_writer), self._answers(server_reader, writer))

    async def _requests(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(await reader.readexactly(24))  # the preface
        while True:
            head = await reader.readexactly(9)
            payload = await reader.readexactly(int.from_bytes(head[:3]))
            self.num_pings += head[3] == PING and not head[4] & IS_ACK
            if not self.is_cut:
                writer.write(head + payload)

    async def _answers(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(2**16):
            if not self.is_cut:
                writer.write(data)


def test_a_silent_call_is_kept_and_a_peer_that_vanishes_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ratio = client.KEEPALIVE_MS // server.MIN_PING_INTERVAL_MS
    assert ratio >= 2, "pings come late and early"
    monkeypatch.setattr(client, "KEEPALIVE_MS", INTERVAL_MS)
    monkeypatch.setattr(client, "KEEPALIVE_TIMEOUT_MS", 3 * INTERVAL_MS)
    monkeypatch.setattr(server, "MIN_PING_INTERVAL_MS", INTERVAL_MS // ratio)

    async def test() -> None:
        path = tmp_path / "server.sock"
        served = GrpcServer(f"unix:{path}", [client.DENSE_WORKER], 2**20)
        await served.start()
        await served.set_serving(True)  # a balanced channel asks for it
        wire = Wire(path)
        port = await wire.start()
        async with client.open_channel(f"ipv4:127.0.0.1:{port}", 2**20) as channel:
            question = health_pb2.HealthCheckRequest(service=client.DENSE_WORKER)
            watch = health_pb2_grpc.HealthStub(channel).Watch(question)
            assert await watch.read()
            answer = asyncio.create_task(watch.read())
            await asyncio.wait_for(until(lambda: wire.num_pings >= 4 or answer.done()), BOUND_S)
            assert not answer.done(), "refused for its pings"
            wire.is_cut = True
            with pytest.raises(grpc.aio.AioRpcError, match="ping timeout"):
                await asyncio.wait_for(answer, BOUND_S)
        await served.stop(0.0)

    run(test())
