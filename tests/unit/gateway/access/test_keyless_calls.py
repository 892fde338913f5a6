"""gRPC calls without an API key (health and reflection): few at once, and no client can use all of them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from services.gateway.access.reception import MAX_KEYLESS_CALLS, MIN_KEYLESS_CALLS
from tests.support.clients.gateway_calls import SERVING, request
from tests.support.clients.http2_frames import begin, call
from tests.support.cluster import free_port
from tests.support.running_gateway import RunningGateway, run, running_gateway
from tests.support.workers.fake_dense import FakeDense

ASK = health_pb2.HealthCheckRequest()
LIST = reflection_pb2.ServerReflectionRequest(list_services="")


@contextlib.asynccontextmanager
async def connection(gateway: RunningGateway) -> AsyncIterator[grpc.aio.Channel]:
    """A separate connection."""
    options = [("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.insecure_channel(gateway.address, options) as channel:
        yield channel


async def open_watch(channel: grpc.aio.Channel) -> grpc.aio.UnaryStreamCall:
    watch = health_pb2_grpc.HealthStub(channel).Watch(ASK)
    assert (await watch.read()).status == SERVING
    return watch


async def assert_refused(channel: grpc.aio.Channel, limit: int) -> None:
    with pytest.raises(grpc.aio.AioRpcError, match=rf"^[\s\S]*the limit is {limit}\b") as refused:
        await open_watch(channel)
    assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


def with_tcp_gateway(tmp_path: Path, dense: FakeDense, test, **options: int) -> None:  # noqa: ANN001
    """Runs `test` against a gateway on TCP, where each connection has an address."""

    async def body() -> None:
        address = f"127.0.0.1:{free_port()}"
        async with running_gateway(tmp_path, dense, address=address, **options) as gateway:
            await test(gateway)

    run(body())


def test_the_calls_of_one_connection_are_limited(tmp_path: Path) -> None:
    async def test(gateway: RunningGateway) -> None:
        async with connection(gateway) as greedy, connection(gateway) as modest:
            watches = await asyncio.gather(*(open_watch(greedy) for _ in range(MAX_KEYLESS_CALLS)))
            await assert_refused(greedy, MAX_KEYLESS_CALLS)
            reflection = reflection_pb2_grpc.ServerReflectionStub(greedy).ServerReflectionInfo()
            assert await reflection.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            answer = await gateway.stub.Generate(request(max_tokens=1))
            assert answer.completions[0].token_ids == [5]

            await asyncio.gather(*(open_watch(modest) for _ in range(MAX_KEYLESS_CALLS // 2)))
            await assert_refused(modest, MAX_KEYLESS_CALLS // 2)
            for watch in watches[MAX_KEYLESS_CALLS // 2 - 1 :]:
                watch.cancel()
            while await health_pb2_grpc.HealthStub(greedy).Check(ASK).code() is not grpc.StatusCode.OK:
                pass  # until the server has seen the cancellations

    with_tcp_gateway(tmp_path, FakeDense(lambda submit: [5]), test)


def test_each_of_many_connections_may_make_some_calls(tmp_path: Path) -> None:
    async def test(gateway: RunningGateway) -> None:
        num_connections = MAX_KEYLESS_CALLS // MIN_KEYLESS_CALLS + 1
        async with contextlib.AsyncExitStack() as stack:
            channels = [await stack.enter_async_context(connection(gateway)) for _ in range(num_connections)]
            for channel in channels:
                await open_watch(channel)
            await asyncio.gather(*(open_watch(channels[-1]) for _ in range(MIN_KEYLESS_CALLS - 1)))
            await assert_refused(channels[-1], MIN_KEYLESS_CALLS)

    with_tcp_gateway(tmp_path, FakeDense(lambda submit: [5]), test)


@pytest.mark.parametrize("method", ["Check", "Watch"])
def test_an_answer_that_the_client_does_not_read_counts(tmp_path: Path, method: str) -> None:
    async def test(gateway: RunningGateway) -> None:
        host, _, port = gateway.address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(begin(window_bytes=0))
        for i in range(MAX_KEYLESS_CALLS + 10):
            writer.write(call(2 * i + 1, f"/grpc.health.v1.Health/{method}"))
        seen = b""
        while seen.count(b"the limit is") < 10:
            seen += await reader.read(65536)
        async with connection(gateway) as channel:
            assert (await health_pb2_grpc.HealthStub(channel).Check(ASK)).status == SERVING
        writer.close()

    with_tcp_gateway(tmp_path, FakeDense(lambda submit: [5]), test)


def test_calls_that_have_ended_are_not_counted(tmp_path: Path) -> None:
    async def test(gateway: RunningGateway) -> None:
        async with connection(gateway) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            reflection = reflection_pb2_grpc.ServerReflectionStub(channel)
            for _ in range(MAX_KEYLESS_CALLS + 1):
                assert (await health.Check(ASK)).status == SERVING
                assert [each async for each in reflection.ServerReflectionInfo(iter([LIST]))]

    with_tcp_gateway(tmp_path, FakeDense(lambda submit: [5]), test)


def test_calls_beyond_the_stream_limit_wait_in_the_client(tmp_path: Path) -> None:
    async def test(gateway: RunningGateway) -> None:
        async with connection(gateway) as channel, connection(gateway) as other:
            watches = [await open_watch(channel) for _ in range(2)]
            third = asyncio.create_task(open_watch(channel))
            for _ in range(10):
                assert (await health_pb2_grpc.HealthStub(other).Check(ASK)).status == SERVING
            assert not third.done()
            watches[0].cancel()
            await third

    with_tcp_gateway(tmp_path, FakeDense(lambda submit: [5]), test, max_grpc_streams=2)
