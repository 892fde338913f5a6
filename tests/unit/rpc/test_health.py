"""Health as gRPC clients see it, also with clients that watch it and never read the answers."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.rpc.server import LIVENESS, GrpcServer
from tests.support.clients.http2_frames import begin, call
from tests.support.running_gateway import run

SERVICE = "some.Service"
Status = health_pb2.HealthCheckResponse


def ask(service: str = SERVICE) -> health_pb2.HealthCheckRequest:
    return health_pb2.HealthCheckRequest(service=service)


def test_a_watcher_gets_each_change_once(tmp_path: Path) -> None:
    async def test() -> None:
        server = GrpcServer(f"unix:{tmp_path}/server.sock", [SERVICE], 2**20)
        async with grpc.aio.insecure_channel(await server.start()) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            watch = stub.Watch(ask())
            seen = [(await watch.read()).status]
            for is_serving in (True, True, False, True):
                before = seen[-1]
                await server.set_serving(is_serving)
                assert (await stub.Check(ask())).status == (Status.SERVING if is_serving else Status.NOT_SERVING)
                if is_serving != (before == Status.SERVING):
                    seen.append((await watch.read()).status)
            assert seen == [Status.NOT_SERVING, Status.SERVING, Status.NOT_SERVING, Status.SERVING]
            stop = asyncio.create_task(server.stop(10.0))
            assert (await watch.read()).status == Status.NOT_SERVING
            watch.cancel()
            await stop

    run(test())


def test_another_service_is_unknown(tmp_path: Path) -> None:
    async def test() -> None:
        server = GrpcServer(f"unix:{tmp_path}/server.sock", [SERVICE], 2**20)
        async with grpc.aio.insecure_channel(await server.start()) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            with pytest.raises(grpc.aio.AioRpcError, match="there is no service 'another'") as refused:
                await stub.Check(ask("another"))
            assert refused.value.code() is grpc.StatusCode.NOT_FOUND
            assert (await stub.Watch(ask("another")).read()).status == Status.SERVICE_UNKNOWN
        await server.stop(0.0)

    run(test())


def test_a_watcher_that_reads_nothing_delays_no_change(tmp_path: Path) -> None:
    """The client's window has no room, so its status is never sent. The server must not wait for that."""

    async def test() -> None:
        server = GrpcServer(f"unix:{tmp_path}/server.sock", [SERVICE], 2**20)
        async with grpc.aio.insecure_channel(await server.start()) as channel:
            reader, writer = await asyncio.open_unix_connection(tmp_path / "server.sock")
            writer.write(begin(window_bytes=0) + call(1, "/grpc.health.v1.Health/Watch"))
            while b"application/grpc" not in await reader.read(65536):  # until the headers of the answer arrive
                pass
            await server.set_serving(True)
            assert (await health_pb2_grpc.HealthStub(channel).Check(ask())).status == Status.SERVING
            await server.stop(0.0)
        writer.close()

    run(test())


def test_a_list_has_all_services(tmp_path: Path) -> None:
    async def test() -> None:
        server = GrpcServer(f"unix:{tmp_path}/server.sock", [SERVICE], 2**20)
        async with grpc.aio.insecure_channel(await server.start()) as channel:
            listed = (await health_pb2_grpc.HealthStub(channel).List(health_pb2.HealthListRequest())).statuses
            assert {name: each.status for name, each in listed.items()} == {
                "": Status.NOT_SERVING,
                SERVICE: Status.NOT_SERVING,
                LIVENESS: Status.SERVING,
            }
        await server.stop(0.0)

    run(test())
