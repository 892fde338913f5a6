"""A call whose messages go by a socket: nothing of them by gRPC, nothing lost at its end, and no end unnoticed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest

from services.common.dense_info import dense_info_metadata
from services.common.errors import PeerError
from services.gateway.link import dense_stream
from services.gateway.link.dense_stream import DenseStream
from services.pb import dense_pb2, dense_pb2_grpc
from services.rpc.message_stream import TAKEN, MessageStream, take_offer
from tests.support.running_gateway import run

MAX_BYTES = 2**20
TIMEOUT_S = 60.0

Serve = Callable[[MessageStream, grpc.aio.ServicerContext], Awaitable[None]]


class Worker(dense_pb2_grpc.DenseWorkerServicer):
    """Takes the socket, then does what `serve` says as soon as the stream has begun; the call ends with it."""

    def __init__(self, serve: Serve) -> None:
        self._serve = serve
        self.has_begun = asyncio.Event()  # gRPC forgets the metadata of a call that ends before somebody asks for them
        self.num_by_grpc = 0

    async def Connect(
        self, requests: AsyncIterator[dense_pb2.GatewayMessage], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[dense_pb2.StepOutput]:
        messages = take_offer(context.invocation_metadata(), MAX_BYTES)
        assert messages is not None
        await context.send_initial_metadata((*dense_info_metadata(dense_pb2.DenseInfo(epoch=5)), *TAKEN))

        async def count() -> None:
            async for _ in requests:
                self.num_by_grpc += 1

        counting = asyncio.create_task(count())
        try:
            await self.has_begun.wait()
            await self._serve(messages, context)
        finally:
            messages.close()
            counting.cancel()
            await asyncio.wait([counting])
        return
        yield dense_pb2.StepOutput()


@asynccontextmanager
async def connected(directory: Path, worker: Worker) -> AsyncIterator[DenseStream]:
    server = grpc.aio.server()
    dense_pb2_grpc.add_DenseWorkerServicer_to_server(worker, server)
    server.add_insecure_port(address := f"unix:{directory}/dense.sock")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(address) as channel:
            with DenseStream.opening(dense_pb2_grpc.DenseWorkerStub(channel), MAX_BYTES, offers_socket=True) as stream:
                info = await stream.begin(TIMEOUT_S)
                assert info.epoch == 5
                worker.has_begun.set()
                yield stream
    finally:
        await server.stop(None)


def test_messages_go_by_the_socket_in_both_directions(tmp_path: Path) -> None:
    async def echo(messages: MessageStream, context: grpc.aio.ServicerContext) -> None:
        while (message := await messages.read()) is not None:
            seq_id = dense_pb2.GatewayMessage.FromString(message).cancel.seq_id
            await messages.write(dense_pb2.StepOutput(step_id=seq_id).SerializeToString())

    async def test() -> None:
        worker = Worker(echo)
        async with connected(tmp_path, worker) as stream:
            outputs = stream.outputs()
            for seq_id in range(3):
                await stream.write(dense_pb2.GatewayMessage(cancel=dense_pb2.Cancel(seq_id=seq_id)))
                assert (await anext(outputs)).step_id == seq_id
            assert worker.num_by_grpc == 0

    run(test())


def test_what_was_sent_before_the_end_of_the_call_is_read(tmp_path: Path) -> None:
    async def part(messages: MessageStream, context: grpc.aio.ServicerContext) -> None:
        for step_id in range(100):
            await messages.write(dense_pb2.StepOutput(step_id=step_id).SerializeToString())

    async def test() -> None:
        async with connected(tmp_path, Worker(part)) as stream:
            await stream._call.code()
            found = []
            with pytest.raises(PeerError, match="ended the stream"):
                async for output in stream.outputs():
                    found.append(output.step_id)
            assert found == list(range(100))

    run(test())


def test_the_reason_of_the_end_is_that_of_the_call(tmp_path: Path) -> None:
    async def refuse(messages: MessageStream, context: grpc.aio.ServicerContext) -> None:
        await context.abort(grpc.StatusCode.UNAVAILABLE, "the worker is stopping")

    async def test() -> None:
        async with connected(tmp_path, Worker(refuse)) as stream:
            with pytest.raises(PeerError, match="UNAVAILABLE: the worker is stopping"):
                async for _ in stream.outputs():
                    pass

    run(test())


def test_a_socket_that_is_closed_while_the_call_goes_on_ends_the_stream(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dense_stream, "END_S", 0.1)

    async def close(messages: MessageStream, context: grpc.aio.ServicerContext) -> None:
        messages.close()
        await asyncio.sleep(TIMEOUT_S)

    async def test() -> None:
        async with connected(tmp_path, Worker(close)) as stream:
            with pytest.raises(PeerError, match="closed the socket"):
                async for _ in stream.outputs():
                    pass
            with pytest.raises(PeerError, match="closed"):
                while True:
                    await stream.write(dense_pb2.GatewayMessage())

    run(test())


def test_a_call_that_ends_while_the_socket_stays_open_ends_the_stream(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dense_stream, "END_S", 0.1)
    kept = list[MessageStream]()

    class Frozen(MessageStream):
        def close(self) -> None:
            """As a worker that is stopped: its socket stays open, and nobody reads it."""

    leaves = asyncio.Event()

    async def leave(messages: MessageStream, context: grpc.aio.ServicerContext) -> None:
        kept.append(messages)
        messages.__class__ = Frozen
        await leaves.wait()

    async def test() -> None:
        async with connected(tmp_path, Worker(leave)) as stream:
            large = dense_pb2.GatewayMessage(cancel=dense_pb2.Cancel(seq_id=1))
            large.submit.output_token_ids.extend(range(300_000))
            writing = asyncio.create_task(stream.write(large))
            await asyncio.sleep(0.05)
            assert not writing.done()
            leaves.set()
            with pytest.raises(PeerError, match="ended the stream"):
                async for _ in stream.outputs():
                    pass
            with pytest.raises(PeerError, match="closed"):
                await writing
            MessageStream.close(kept[0])

    run(test())


def test_a_farewell_that_has_arrived_is_read_after_a_write_that_failed(tmp_path: Path) -> None:
    async def part(messages: MessageStream, context: grpc.aio.ServicerContext) -> None:
        for step_id in range(30):
            await messages.write(dense_pb2.StepOutput(step_id=step_id).SerializeToString())
        await messages.write(dense_pb2.StepOutput(farewell=dense_pb2.Farewell(reason="bye")).SerializeToString())

    async def test() -> None:
        async with connected(tmp_path, Worker(part)) as stream:
            await stream._call.code()

            async def write() -> None:
                while True:
                    await stream.write(dense_pb2.GatewayMessage(cancel=dense_pb2.Cancel(seq_id=1)))

            writing = asyncio.create_task(write())
            await asyncio.sleep(0)
            found = []
            with pytest.raises(PeerError, match="ended the stream"):
                async for output in stream.outputs():
                    found.append(output)
            assert len(found) == 31
            assert found[-1].farewell.reason == "bye"
            with pytest.raises(PeerError, match="closed"):
                await writing

    run(test())


def test_without_a_socket_messages_go_by_grpc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise OSError("no file descriptors are left")

    monkeypatch.setattr(dense_stream, "StreamOffer", fail)

    async def serve(messages: MessageStream, context: grpc.aio.ServicerContext) -> None:
        raise AssertionError("there is no socket")

    class Plain(Worker):
        async def Connect(
            self, requests: AsyncIterator[dense_pb2.GatewayMessage], context: grpc.aio.ServicerContext
        ) -> AsyncIterator[dense_pb2.StepOutput]:
            await context.send_initial_metadata(dense_info_metadata(dense_pb2.DenseInfo(epoch=5)))
            assert take_offer(context.invocation_metadata(), MAX_BYTES) is None
            async for request in requests:
                yield dense_pb2.StepOutput(step_id=request.cancel.seq_id)

    async def test() -> None:
        async with connected(tmp_path, Plain(serve)) as stream:
            await stream.write(dense_pb2.GatewayMessage(cancel=dense_pb2.Cancel(seq_id=3)))
            assert (await anext(stream.outputs())).step_id == 3

    run(test())
