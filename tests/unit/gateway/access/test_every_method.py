"""Every gRPC method that the server tells by reflection, without a key and with a wrong one.

All but those for health and reflection refuse such calls, whatever the message, and none fails with an internal error.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
from google.protobuf import descriptor_pool
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from tests.support.running_gateway import run, running_gateway
from tests.support.workers.fake_dense import FakeDense

KEYLESS = {"grpc.health.v1.Health", "grpc.reflection.v1.ServerReflection", "grpc.reflection.v1alpha.ServerReflection"}
GUARDED = {"inference.GRPCInferenceService", "twostroke.v1.Gateway"}
WRONG = [(), (("authorization", "Bearer wrong-key-0123456789"),), (("x-api-key", "wrong-key-0123456789"),)]
TIMEOUT_S = 30.0


async def services_of(channel: grpc.aio.Channel) -> set[str]:
    call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(
        iter([reflection_pb2.ServerReflectionRequest(list_services="")]), timeout=TIMEOUT_S
    )
    return {service.name async for answer in call for service in answer.list_services_response.service}


def status_of(channel: grpc.Channel, path: str, metadata: tuple, is_watch: bool) -> grpc.StatusCode:
    """How a call with one empty message ends; OK for a watch that answers.

    By gRPC's client with threads: that of asyncio may report its own failed write in place of the server's refusal.
    """
    call = channel.stream_stream(path)(iter([b""]), metadata=metadata, timeout=TIMEOUT_S)
    try:
        for _ in call:
            if is_watch:
                call.cancel()
                return grpc.StatusCode.OK
    except grpc.RpcError as error:
        return error.code()
    return call.code()


def test_every_method_refuses_calls_without_a_key_or_with_a_wrong_one(tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text('[[keys]]\nname = "someone"\nkey = "a-secret-key-0123456789"\n')
    dense = FakeDense(lambda submit: [1])

    async def test(channel: grpc.aio.Channel, threads_channel: grpc.Channel) -> None:
        names = await services_of(channel)
        assert names == KEYLESS | GUARDED
        pool = descriptor_pool.Default()
        for name in sorted(names):
            for method in pool.FindServiceByName(name).methods:
                for metadata in WRONG:
                    path = f"/{name}/{method.name}"
                    status = await asyncio.to_thread(status_of, threads_channel, path, metadata, method.name == "Watch")
                    if name in GUARDED:
                        assert status is grpc.StatusCode.UNAUTHENTICATED, (path, metadata, status)
                    else:
                        assert status is grpc.StatusCode.OK, (path, metadata, status)
        status = await asyncio.to_thread(status_of, threads_channel, "/twostroke.v1.Gateway/NoMethod", (), False)
        assert status is grpc.StatusCode.UNIMPLEMENTED

    async def body() -> None:
        async with (
            running_gateway(tmp_path, dense, api_keys_file=keys) as gateway,
            grpc.aio.insecure_channel(gateway.address) as channel,
        ):
            with grpc.insecure_channel(gateway.address) as threads_channel:
                await test(channel, threads_channel)

    run(body())
    assert not dense.submits
