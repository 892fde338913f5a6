"""Connections to the gateway's gRPC port: their number is limited, and an idle connection is closed."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import grpc

from services.pb import gateway_pb2_grpc
from tests.support.clients.gateway_calls import request
from tests.support.clients.http2_frames import begin
from tests.support.cluster import free_port
from tests.support.running_gateway import RunningGateway, run, running_gateway
from tests.support.workers.fake_dense import FakeDense

MAX_CONNECTIONS = 20


async def connect(address: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection that is ready for calls, if the server accepts it."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    with contextlib.suppress(ConnectionError):
        writer.write(begin())
        await writer.drain()
    return reader, writer


async def until_closed(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):
        while await reader.read(65536):
            pass
    writer.close()


def with_tcp_gateway(tmp_path: Path, dense: FakeDense, test, **options: float) -> None:  # noqa: ANN001
    async def body() -> None:
        address = f"127.0.0.1:{free_port()}"
        local = f"unix:{tmp_path}/local.sock"
        async with running_gateway(tmp_path, dense, address=address, local_address=local, **options) as gateway:
            await test(gateway)

    run(body())


def test_connections_beyond_the_limit_are_closed(tmp_path: Path) -> None:
    async def test(gateway: RunningGateway) -> None:
        ends = [asyncio.create_task(until_closed(*await connect(gateway.address))) for _ in range(2000)]
        for num_ended, end in enumerate(asyncio.as_completed(ends), 1):
            await end
            if num_ended == len(ends) - MAX_CONNECTIONS:
                break
        # The limit does not apply to the local socket.
        answer = await gateway.stub.Generate(request(max_tokens=1))
        assert answer.completions[0].token_ids == [5]
        assert sum(not end.done() for end in ends) == MAX_CONNECTIONS
        for end in ends:
            end.cancel()

    with_tcp_gateway(tmp_path, FakeDense(lambda submit: [5]), test, max_grpc_connections=MAX_CONNECTIONS)


def test_a_connection_without_a_call_is_closed_and_one_with_a_stream_is_not(tmp_path: Path) -> None:
    idle_timeout_s = 1.0  # a busy machine may stop this process for a while, which must not end a connection in use

    async def test(gateway: RunningGateway) -> None:
        async with grpc.aio.insecure_channel(gateway.address) as channel:
            stub = gateway_pb2_grpc.GatewayStub(channel)
            call = stub.GenerateStream(request(max_tokens=100))
            await call.read()
            await until_closed(*await connect(gateway.address))
            assert not call.done()
            call.cancel()
            while channel.get_state() is grpc.ChannelConnectivity.READY:
                await channel.wait_for_state_change(grpc.ChannelConnectivity.READY)
            answer = await stub.Generate(request(max_tokens=1))  # on a new connection
            assert answer.completions[0].token_ids == [5]

    dense = FakeDense(lambda submit: [5])  # no more tokens after the first one
    with_tcp_gateway(tmp_path, dense, test, grpc_idle_timeout_s=idle_timeout_s)


def test_a_connection_that_sends_nothing_is_closed(tmp_path: Path) -> None:
    async def test(gateway: RunningGateway) -> None:
        host, _, port = gateway.address.rpartition(":")
        await until_closed(*await asyncio.open_connection(host, int(port)))

    with_tcp_gateway(tmp_path, FakeDense(lambda submit: [5]), test, header_timeout_s=0.3)
