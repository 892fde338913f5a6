"""Calls that concern the other gateway processes, too: an Abort of their request, adapters that all of them serve."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import grpc
import pytest

from services.common.errors import PeerError
from services.gateway.siblings import PASSED_ON, Siblings
from services.pb import gateway_pb2, gateway_pb2_grpc

MAX_BYTES = 1 << 20


class FakeGateway(gateway_pb2_grpc.GatewayServicer):
    """Runs one request of the caller with the API key `secret`."""

    def __init__(self, running: str) -> None:
        self.running = running
        self.metadata: list[dict[str, str]] = []
        self.directories = {"everywhere"}
        self.adapters: set[str] = set()

    async def Abort(
        self, request: gateway_pb2.AbortRequest, context: grpc.aio.ServicerContext
    ) -> gateway_pb2.AbortResponse:
        metadata = dict(context.invocation_metadata() or ())
        self.metadata.append(metadata)
        if metadata.get("authorization") != "Bearer secret":
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "no API key")
        return gateway_pb2.AbortResponse(was_running=request.request_id == self.running)

    async def LoadAdapter(
        self, request: gateway_pb2.LoadAdapterRequest, context: grpc.aio.ServicerContext
    ) -> gateway_pb2.LoadAdapterResponse:
        if request.path not in self.directories:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "no such directory here")
        self.adapters.add(request.name)
        return gateway_pb2.LoadAdapterResponse()

    async def UnloadAdapter(
        self, request: gateway_pb2.UnloadAdapterRequest, context: grpc.aio.ServicerContext
    ) -> gateway_pb2.UnloadAdapterResponse:
        if request.name not in self.adapters:
            await context.abort(grpc.StatusCode.NOT_FOUND, "no such adapter")
        self.adapters.remove(request.name)
        return gateway_pb2.UnloadAdapterResponse()


@contextlib.asynccontextmanager
async def serving(gateways: Sequence[FakeGateway], directory: Path) -> AsyncIterator[list[str]]:
    addresses, servers = [], []
    for index, gateway in enumerate(gateways):
        addresses.append(f"unix:{directory}/{index}.sock")
        servers.append(grpc.aio.server())
        gateway_pb2_grpc.add_GatewayServicer_to_server(gateway, servers[-1])
        servers[-1].add_insecure_port(addresses[-1])
        await servers[-1].start()
    try:
        yield addresses
    finally:
        for server in servers:
            await server.stop(None)


def abort(directory: Path, request_id: str, *metadata: tuple[str, str]) -> tuple[bool, list[FakeGateway]]:
    gateways = [FakeGateway("a"), FakeGateway("b")]

    async def main() -> bool:
        async with serving(gateways, directory) as addresses:
            siblings = Siblings([*addresses, f"unix:{directory}/being-started.sock"], MAX_BYTES)
            return await siblings.abort(gateway_pb2.AbortRequest(request_id=request_id), metadata)

    return asyncio.run(main()), gateways


def test_an_abort_is_passed_on_to_all_siblings_with_the_callers_credentials(tmp_path: Path) -> None:
    key = ("authorization", "Bearer secret")
    was_running, gateways = abort(tmp_path, "b", key, ("x-other", "stays here"))
    assert was_running
    for gateway in gateways:
        [metadata] = gateway.metadata
        assert metadata["authorization"] == "Bearer secret" and metadata[PASSED_ON] == "1"
        assert "x-other" not in metadata
    assert abort(tmp_path, "c", key)[0] is False


def test_without_the_key_nothing_is_aborted(tmp_path: Path) -> None:
    assert abort(tmp_path, "b")[0] is False


def test_an_abort_from_a_sibling_is_not_passed_on_again(tmp_path: Path) -> None:
    was_running, gateways = abort(tmp_path, "b", ("authorization", "Bearer secret"), (PASSED_ON, "1"))
    assert not was_running and not gateways[0].metadata and not gateways[1].metadata


def test_an_adapter_that_a_sibling_does_not_load_is_an_error_that_names_it(tmp_path: Path) -> None:
    gateways = [FakeGateway("a"), FakeGateway("b")]
    gateways[0].directories.add("at the first")

    async def main() -> None:
        async with serving(gateways, tmp_path) as addresses:
            siblings = Siblings(addresses, MAX_BYTES)
            everywhere = gateway_pb2.LoadAdapterRequest(name="x", path="everywhere")
            await siblings.load_adapter(everywhere, [(PASSED_ON, "1")])
            assert not gateways[0].adapters, "it came from a sibling"
            await siblings.load_adapter(everywhere, [])
            assert [gateway.adapters for gateway in gateways] == [{"x"}, {"x"}]
            with pytest.raises(PeerError, match=rf"'y' .* at {addresses[1]} \(no such directory here\)") as caught:
                await siblings.load_adapter(gateway_pb2.LoadAdapterRequest(name="y", path="at the first"), [])
            assert addresses[0] not in str(caught.value)
            await siblings.unload_adapter(gateway_pb2.UnloadAdapterRequest(name="y"), [])  # the second never had it
            assert [gateway.adapters for gateway in gateways] == [{"x"}, {"x"}]
            absent = Siblings([*addresses, f"unix:{tmp_path}/gone.sock"], MAX_BYTES)
            with pytest.raises(PeerError, match=r"gone\.sock"):
                await absent.unload_adapter(gateway_pb2.UnloadAdapterRequest(name="x"), [])

    asyncio.run(asyncio.wait_for(main(), 60))
