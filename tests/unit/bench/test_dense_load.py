"""Why the stream to a dense worker has ended, and that a load says it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest

from bench.load.dense_load import DenseLoad, DenseRequest, open_dense
from bench.load.transport import LoadError
from services.pb import dense_pb2, dense_pb2_grpc
from services.rpc.stream_socket import KEY, SocketOffer


class RefusingWorker(dense_pb2_grpc.DenseWorkerServicer):
    """Ends a stream with an error at its first message, which may come by a socket."""

    def __init__(self, *, has_socket: bool, metadata: tuple[tuple[str, str], ...] = ()) -> None:
        """`metadata`: of the stream if there is no socket."""
        self._has_socket, self._metadata = has_socket, metadata

    async def Connect(
        self, requests: AsyncIterator[dense_pb2.GatewayMessage], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[dense_pb2.StepOutput]:
        has_come = asyncio.Event()
        offer = SocketOffer(lambda _: has_come.set(), lambda _: None, 2**20) if self._has_socket else None
        await context.send_initial_metadata(self._metadata if offer is None else offer.metadata)
        try:
            await (anext(aiter(requests)) if offer is None else has_come.wait())
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the prompt is empty")
            yield dense_pb2.StepOutput()
        finally:
            if offer is not None:
                self._closing = asyncio.create_task(offer.close())


async def replay(worker: RefusingWorker, address: str) -> None:
    server = grpc.aio.server()
    dense_pb2_grpc.add_DenseWorkerServicer_to_server(worker, server)
    server.add_insecure_port(address)
    await server.start()
    try:
        async with open_dense(address) as channel:
            load = DenseLoad(channel, temperature=0.0, cache_salt="")
            await load.replay([DenseRequest([5, 6, 7], 4, 0.0)], None, 20.0)
    finally:
        await server.stop(None)


@pytest.mark.parametrize("has_socket", [True, False])
def test_a_load_says_why_the_dense_worker_has_ended_the_stream(has_socket: bool, tmp_path: Path) -> None:
    with pytest.raises(LoadError, match="the prompt is empty"):
        asyncio.run(replay(RefusingWorker(has_socket=has_socket), f"unix:{tmp_path}/dense.sock"))


@pytest.mark.parametrize(
    ("has_socket", "metadata", "said"),
    [
        (True, (), ""),
        (False, (), "Messages go by gRPC: the dense worker offers no socket."),
        (False, ((KEY, "nobody-listens:secret"),), "Messages go by gRPC: the dense worker's socket cannot be"),
    ],
)
def test_a_load_says_that_its_messages_take_the_slower_way(
    has_socket: bool,
    metadata: tuple[tuple[str, str], ...],
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    worker = RefusingWorker(has_socket=has_socket, metadata=metadata)
    with pytest.raises(LoadError):
        asyncio.run(replay(worker, f"unix:{tmp_path}/dense.sock"))
    printed = capsys.readouterr().err
    assert printed.startswith(said) and bool(printed) == bool(said)
