"""An Abort that arrives at another gateway process than its request."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import grpc

from services.gateway.siblings import PASSED_ON, Siblings
from services.pb import gateway_pb2, gateway_pb2_grpc

MAX_BYTES = 1 << 20


class FakeGateway(gateway_pb2_grpc.GatewayServicer):
    """Runs one request of the caller with the API key `secret`."""

    def __init__(self, running: str) -> None:
        self.running = running
        self.metadata: list[dict[str, str]] = []

    async def Abort(
        self, request: gateway_pb2.AbortRequest, context: grpc.aio.ServicerContext
    ) -> gateway_pb2.AbortResponse:
        metadata = dict(context.invocation_metadata() or ())
        self.metadata.append(metadata)
        if metadata.get("authorization") != "Bearer secret":
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "no API key")
        return gateway_pb2.AbortResponse(was_running=request.request_id == self.running)


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
