"""A dense worker without a model, to test gateways: it emits one token per stream and step.

It runs in a process of its own, behind the real gRPC API. Steps have a fixed pace, or are as fast as clients receive
tokens: clients report their receipts, and at most `max_backlog` steps are in flight.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import socket
import struct
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import grpc
import uvloop

from bench.load.stats import NS_PER_S
from services.common.config import PeerSection
from services.pb import dense_pb2, dense_pb2_grpc
from services.rpc.stream_socket import SocketOffer

MAX_MODEL_LEN = 100_000_000  # no stream ends while it is measured
RECEIPT = struct.Struct("<q")  # tokens that a client received since its last receipt
READY_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class StubSettings:
    """The settings of the stub."""

    address: str  # to listen at
    receipt_file: Path  # Unix datagram socket for the receipts of clients
    token_ids: tuple[int, ...]  # emitted in turn, the same token to all streams of a step
    pace_s: float  # from one step to the next; 0: as fast as clients take them
    max_backlog: int  # steps in flight, without a pace
    offers_socket: bool = True  # for messages, beside the gRPC stream, as the dense worker does


@dataclass(frozen=True, slots=True)
class StubReport:
    """The stub's record. Times in ns of the monotonic clock."""

    step_ns: list[int]  # when each step was handed to gRPC
    first_step: dict[int, int]  # by seed: index of the step with a stream's first token
    num_gateways: int  # connected now


class Stub:
    """A running stub process."""

    def __init__(self, pid: int, connection: Connection) -> None:
        self.pid = pid
        self._connection = connection

    def report(self) -> StubReport:
        """The stub's record so far."""
        self._connection.send("report")
        return self._connection.recv()


@contextlib.contextmanager
def running_stub(settings: StubSettings) -> Iterator[Stub]:
    """Starts a stub that listens, and kills it at the end."""
    context = multiprocessing.get_context("spawn")  # gRPC does not survive a fork
    connection, far_end = context.Pipe()
    process = context.Process(target=_run, args=(settings, far_end), daemon=True)
    process.start()
    far_end.close()
    try:
        if not connection.poll(READY_TIMEOUT_S):
            raise TimeoutError(f"the stub was not ready after {READY_TIMEOUT_S:g} s")
        connection.recv()
        assert process.pid is not None
        yield Stub(process.pid, connection)
    finally:
        process.kill()
        process.join()
        connection.close()


def _run(settings: StubSettings, parent: Connection) -> None:
    uvloop.run(_serve(settings, parent))


async def _serve(settings: StubSettings, parent: Connection) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receipts:
        receipts.bind(str(settings.receipt_file))
        receipts.setblocking(False)
        stub = _StubDense(settings, receipts)
        server = grpc.aio.server()
        dense_pb2_grpc.add_DenseWorkerServicer_to_server(stub, server)
        server.add_insecure_port(settings.address)
        await server.start()
        asyncio.get_running_loop().add_reader(receipts, stub.take_receipts)
        steps = asyncio.create_task(stub.run_steps())
        parent.send("ready")
        while True:
            await asyncio.to_thread(parent.recv)  # waits until the parent kills this process
            if steps.done():
                steps.result()  # raises what has ended it
            parent.send(StubReport(stub.step_ns, stub.first_step, stub.num_gateways))


class _StubDense(dense_pb2_grpc.DenseWorkerServicer):
    def __init__(self, settings: StubSettings, receipts: socket.socket) -> None:
        self.step_ns: list[int] = []
        self.first_step: dict[int, int] = {}
        self._settings = settings
        self._receipts = receipts
        self._num_under_way = 0  # tokens sent and not yet received
        self._updates = asyncio.Event()
        self._gateways: list[_Gateway] = []

    def take_receipts(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while True:
                [num_tokens] = RECEIPT.unpack(self._receipts.recv(RECEIPT.size))
                self._num_under_way -= num_tokens
                self._updates.set()

    @property
    def num_gateways(self) -> int:
        """Connected gateways, which may submit."""
        return sum(each.has_resumed for each in self._gateways)

    async def GetInfo(
        self, request: dense_pb2.GetInfoRequest, context: grpc.aio.ServicerContext
    ) -> dense_pb2.DenseInfo:
        return dense_pb2.DenseInfo(
            family="llama",
            dtype="float32",
            vocab_size=1024,
            num_layers=1,
            max_model_len=MAX_MODEL_LEN,
            weights_hash="c0ffee",
            backend="stub",
            device="cpu",
            offers_socket=self._settings.offers_socket,
        )

    async def Connect(
        self, requests: AsyncIterator[dense_pb2.GatewayMessage], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[dense_pb2.StepOutput]:
        gateway = _Gateway()
        self._gateways.append(gateway)
        offer = None
        if self._settings.offers_socket:
            offer = SocketOffer(partial(self._receive, gateway), lambda error: None, PeerSection().max_message_bytes)
            await context.send_initial_metadata(offer.metadata)
        reader = asyncio.create_task(self._read(requests, gateway))
        try:
            while True:
                output = await gateway.outputs.get()
                if offer is not None and offer.connected is not None:
                    offer.connected.send(output.SerializeToString())
                    await offer.connected.drain()
                else:
                    yield output
        finally:
            reader.cancel()
            self._gateways.remove(gateway)
            if offer is not None:
                await offer.close()

    async def run_steps(self) -> None:
        """Emits steps, each with the streams of all gateways, until cancelled."""
        token_ids = self._settings.token_ids
        due_ns = 0
        while True:
            while not (num_streams := self._num_streams()) or self._is_full(num_streams):
                self._updates.clear()
                await self._updates.wait()
            if self._settings.pace_s:
                due_ns = max(due_ns + round(self._settings.pace_s * NS_PER_S), time.monotonic_ns())
                await asyncio.sleep((due_ns - time.monotonic_ns()) / NS_PER_S)
            else:
                await asyncio.sleep(0)  # what has just been put is sent
            step = len(self.step_ns)
            token_id = token_ids[step % len(token_ids)]
            outputs = [(each, _step_output(step, each.streams, token_id)) for each in self._gateways if each.streams]
            if not outputs:
                continue
            for gateway, output in outputs:
                self._num_under_way += len(output.seq_ids)
                for start in output.started:
                    self.first_step[gateway.streams[start.seq_id].seed] = step
            self.step_ns.append(time.monotonic_ns())
            for gateway, output in outputs:
                gateway.outputs.put_nowait(output)
                for end in output.ended:
                    gateway.streams.pop(end.seq_id, None)

    def _num_streams(self) -> int:
        return sum(len(gateway.streams) for gateway in self._gateways)

    def _is_full(self, num_streams: int) -> bool:
        """Whether more tokens would exceed the backlog. A paced stub has no such limit."""
        return not self._settings.pace_s and self._num_under_way > (self._settings.max_backlog - 1) * num_streams

    async def _read(self, requests: AsyncIterator[dense_pb2.GatewayMessage], gateway: _Gateway) -> None:
        async for message in requests:
            self._handle(gateway, message)

    def _receive(self, gateway: _Gateway, message: bytes) -> None:
        self._handle(gateway, dense_pb2.GatewayMessage.FromString(message))

    def _handle(self, gateway: _Gateway, message: dense_pb2.GatewayMessage) -> None:
        streams = gateway.streams
        if message.WhichOneof("message") == "submit":
            submit = message.submit
            streams[submit.seq_id] = _Stream(submit.spec.sampling.seed, submit.spec.max_tokens)
        elif message.WhichOneof("message") == "cancel":
            streams.pop(message.cancel.seq_id, None)
        elif message.WhichOneof("message") == "resumed":
            gateway.has_resumed = True
        if not self._num_streams():
            self._num_under_way = 0  # cancelled tokens are never reported
        self._updates.set()


class _Gateway:
    """One gateway's stream."""

    def __init__(self) -> None:
        self.streams: dict[int, _Stream] = {}  # by seq_id
        self.outputs = asyncio.Queue[dense_pb2.StepOutput]()
        self.has_resumed = False


class _Stream:
    """One running sequence."""

    __slots__ = ("is_started", "num_left", "seed")

    def __init__(self, seed: int, max_tokens: int) -> None:
        self.seed = seed  # which clients choose to tell streams apart
        self.num_left = max_tokens  # tokens
        self.is_started = False


def _step_output(step: int, streams: dict[int, _Stream], token_id: int) -> dense_pb2.StepOutput:
    output = dense_pb2.StepOutput(step_id=step + 1, seq_ids=streams, token_ids=[token_id] * len(streams))
    for seq_id, stream in streams.items():
        stream.num_left -= 1
        if not stream.is_started:
            stream.is_started = True
            output.started.add(seq_id=seq_id)
        if not stream.num_left:
            output.ended.add(seq_id=seq_id, reason=dense_pb2.SequenceEnd.LENGTH)
    return output
