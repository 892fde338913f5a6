"""The messages of a gateway and a dense worker go by a socket on one host, and by gRPC where there is none."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import grpc
import pytest

from services.common.config import PeerSection
from services.dense_worker.engine.sequence import Sequence, SequenceOutput
from services.dense_worker.engine.step_report import StepOutputs, StepReport
from services.dense_worker.engine.tracing import SequenceTracer
from services.dense_worker.metrics import DenseMetrics
from services.dense_worker.servicer import DenseServicer
from services.gateway.link.dense_pool import DensePool
from services.gateway.link.journal import Journal
from services.gateway.link.journal_entry import JournalEntry
from services.pb import dense_pb2, dense_pb2_grpc
from services.rpc import stream_socket
from services.rpc.metrics import new_registry
from services.rpc.spans import NoTracer
from services.rpc.stream_socket import KEY, SocketOffer, StreamSocket
from tests.support.clients.generation_requests import make_request, open_entry, take
from tests.support.running_gateway import run, until
from tests.support.workers.fake_dense import FakeDense

INFO = {"family": "llama", "vocab_size": 100, "max_model_len": 100, "weights_hash": "c0ffee"}
MAX_TOKENS = 50


class Counting(DenseServicer):
    """Counts the messages that come by gRPC."""

    num_by_grpc = 0

    async def Connect(
        self, requests: AsyncIterator[dense_pb2.GatewayMessage], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[dense_pb2.StepOutput]:
        async for output in super().Connect(self._count(requests), context):
            yield output

    async def _count(
        self, requests: AsyncIterator[dense_pb2.GatewayMessage]
    ) -> AsyncIterator[dense_pb2.GatewayMessage]:
        async for request in requests:
            self.num_by_grpc += 1
            yield request


@dataclass
class Pair:
    """A gateway's pool, and the servicer that it is connected to."""

    servicer: Counting
    submitted: asyncio.Queue[Sequence]
    pool: DensePool
    journal: Journal

    def submit(self, request_id: str = "r") -> JournalEntry:
        request = make_request(request_id, prompt_token_ids=[5, 6], max_tokens=MAX_TOKENS)
        entry = open_entry(self.journal, request)
        self.pool.submit(entry)
        return entry

    def give(self, step_id: int, sequence: Sequence, token_id: int) -> None:
        outputs = StepOutputs(others=[SequenceOutput(sequence, (token_id,), None)])
        self.servicer.streams.deliver(StepReport(step_id, admitted=[sequence], outputs=outputs))


@asynccontextmanager
async def connected(tmp_path: Path, *, rehearses: bool = False) -> AsyncIterator[Pair]:
    submitted: asyncio.Queue[Sequence] = asyncio.Queue()
    servicer = Counting(DenseMetrics(new_registry("dense")), SequenceTracer(NoTracer()), 2**20)
    servicer.set_engine(Mock(submit=submitted.put_nowait, spans_under_way=dict), Mock(stall=None), (), 50)
    servicer.set_info(dense_pb2.DenseInfo(**INFO, rehearses=rehearses))
    server, address = grpc.aio.server(), f"unix:{tmp_path}/dense.sock"
    dense_pb2_grpc.add_DenseWorkerServicer_to_server(servicer, server)
    server.add_insecure_port(address)
    await server.start()
    journal = Journal()
    pool = DensePool(address, PeerSection(), journal, ignore)
    running = asyncio.create_task(pool.run())
    await pool.wait_connected()
    try:
        yield Pair(servicer, submitted, pool, journal)
    finally:
        running.cancel()
        await asyncio.wait([running])
        await server.stop(None)


def num_sockets() -> int:
    """Sockets of streams that this process has a descriptor of and that have a name: the servers' ones."""
    own = set()
    for each in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            own.add(str(each.readlink()).removeprefix("socket:[").removesuffix("]"))
    rows = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    return sum(row[6] in own and row[-1].startswith("@twostroke-stream-") for row in rows)


async def ignore(is_connected: bool) -> None: ...


def test_messages_of_one_host_go_by_the_socket(tmp_path: Path) -> None:
    async def test() -> None:
        async with connected(tmp_path) as pair:
            entry = pair.submit()
            sequence = await pair.submitted.get()
            for token_id in range(10, 10 + MAX_TOKENS - 1):
                pair.give(token_id, sequence, token_id)
            found: list[int] = []
            while len(found) < MAX_TOKENS - 1:
                found += await take(entry)
            assert found == list(range(10, 10 + MAX_TOKENS - 1))
            assert pair.servicer.num_by_grpc == 0

    run(test())


@pytest.mark.parametrize("rehearses", [True, False])
def test_a_worker_that_rehearses_expects_a_request_that_comes_while_there_is_no_other(
    tmp_path: Path, rehearses: bool
) -> None:
    async def test() -> None:
        async with connected(tmp_path, rehearses=rehearses) as pair:
            expect: Mock = pair.servicer._engine.expect  # type: ignore[union-attr, assignment]
            pair.pool.announce()
            if rehearses:
                await until(lambda: expect.call_count == 1)
            entry = pair.submit()
            pair.pool.announce()
            pair.give(1, await pair.submitted.get(), 11)
            assert await take(entry) == [11]
            assert expect.call_count == rehearses, "nothing is announced while there is a sequence"

    run(test())


def test_nothing_is_announced_to_a_worker_that_does_not_read(tmp_path: Path) -> None:
    async def test() -> None:
        async with connected(tmp_path, rehearses=True) as pair:
            expect: Mock = pair.servicer._engine.expect  # type: ignore[union-attr, assignment]
            [client] = pair.pool._clients
            assert client._socket is not None
            client._socket.pause_writing()
            pair.pool.announce()
            client._socket.resume_writing()
            pair.pool.announce()
            pair.give(1, (pair.submit(), await pair.submitted.get())[1], 11)
            assert expect.call_count == 1

    run(test())


def test_without_a_socket_they_go_by_grpc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> None:
        raise OSError(24, "Too many open files")

    async def test() -> None:
        async with connected(tmp_path) as pair:
            entry = pair.submit()
            pair.give(1, await pair.submitted.get(), 11)
            assert await take(entry) == [11]
            assert pair.servicer.num_by_grpc == 2, "Resumed and the sequence"

    monkeypatch.setattr(SocketOffer, "__init__", refuse)
    run(test())


def test_a_worker_whose_socket_is_elsewhere_is_used_by_grpc(tmp_path: Path) -> None:
    dense = FakeDense(lambda submit: [7, 8])
    dense.info.offers_socket = True
    dense.further_metadata = ((KEY, "twostroke-stream-of-another-machine:secret"),)

    async def test() -> None:
        address = f"unix:{tmp_path}/dense.sock"
        await dense.start(address)
        journal = Journal()
        pool = DensePool(address, PeerSection(), journal, ignore)
        running = asyncio.create_task(pool.run())
        await pool.wait_connected()
        entry = open_entry(journal, make_request("r", prompt_token_ids=[5], max_tokens=2))
        pool.submit(entry)
        await until(lambda: entry.finish_reason is not None)
        assert await take(entry) == [7, 8]
        running.cancel()
        await asyncio.wait([running])
        await dense.kill()

    run(test())


def test_a_worker_that_has_stopped_reading_is_left_when_its_stream_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends: list[StreamSocket] = []
    reach = StreamSocket.reach

    async def reach_and_keep(*arguments: Any) -> StreamSocket:
        ends.append(await reach(*arguments))
        return ends[-1]

    dense = FakeDense(lambda submit: [7, 8])
    dense.info.offers_socket = True
    dense.further_metadata = ((KEY, f"{tmp_path}:secret"),)

    async def test() -> None:
        address = f"unix:{tmp_path}/dense.sock"
        await dense.start(address)
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(f"\0{tmp_path}")
            listener.listen()
            listener.setblocking(False)
            journal = Journal()
            pool = DensePool(address, PeerSection(), journal, ignore)
            running = asyncio.create_task(pool.run())
            stopped, _ = await asyncio.get_running_loop().sock_accept(listener)
            stopped.send(bytes(4))
            await pool.wait_connected()
            entry = open_entry(journal, make_request("r", prompt_token_ids=[5] * 2**20, max_tokens=2))
            pool.submit(entry)
            await until(lambda: ends[0]._transport.get_write_buffer_size() > 0)
            await dense.kill()
            dense.further_metadata = ()
            await dense.start(address)
            await until(lambda: entry.finish_reason is not None)
            assert await take(entry) == [7, 8]
            running.cancel()
            await asyncio.wait([running])
            await dense.kill()
            stopped.close()

    monkeypatch.setattr(StreamSocket, "reach", reach_and_keep)
    run(test())


def test_tokens_before_a_farewell_count_and_the_sequence_is_submitted_again(tmp_path: Path) -> None:
    async def test() -> None:
        async with connected(tmp_path) as pair:
            entry = pair.submit()
            sequence = await pair.submitted.get()
            pair.give(1, sequence, 11)
            pair.give(2, sequence, 12)
            pair.servicer.end_streams(dense_pb2.Farewell(reason="another one takes over"))
            again = await pair.submitted.get()
            assert (again.seq_id, again.output_token_ids, again.num_crashes) == (entry.seq_id, [11, 12], 0)

    run(test())


def test_a_stream_whose_socket_breaks_is_opened_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ends: list[StreamSocket] = []
    reach = StreamSocket.reach

    async def reach_and_keep(*arguments: Any) -> StreamSocket:
        ends.append(await reach(*arguments))
        return ends[-1]

    async def test() -> None:
        async with connected(tmp_path) as pair:
            entry = pair.submit()
            await pair.submitted.get()
            ends[0]._transport.abort()
            again = await pair.submitted.get()
            assert again.seq_id == entry.seq_id
            pair.give(1, again, 11)
            assert await take(entry) == [11]
            assert len(ends) == 2

    monkeypatch.setattr(StreamSocket, "reach", reach_and_keep)
    run(test())


def test_an_ended_stream_leaves_no_socket(tmp_path: Path) -> None:
    async def test() -> None:
        async with connected(tmp_path) as pair:
            [client], streams = pair.pool._clients, pair.servicer.streams
            for number in range(2, 6):
                client.reopen()
                await until(lambda newest=number: streams.outbox(newest) is not None and client.is_connected)
                await until(lambda: num_sockets() == 2)  # a listener and the server's end

    run(test())


def test_a_message_is_written_at_once_unless_others_wait_or_the_peer_does_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent, send = list[StreamSocket](), StreamSocket.send

    def note_and_send(end: StreamSocket, message: bytes) -> None:
        sent.append(end)
        send(end, message)

    async def test() -> None:
        async with connected(tmp_path) as pair:
            [client] = pair.pool._clients
            first = pair.submit("first")  # with what a stream begins with
            await pair.submitted.get()
            assert client._outbox is not None
            await until(lambda: not client._outbox)
            monkeypatch.setattr(StreamSocket, "send", note_and_send)
            entry = pair.submit()
            assert sent == [client._socket]
            sequence = await pair.submitted.get()
            pair.give(1, sequence, 11)
            assert len(sent) == 2, "written in the call that delivers it"
            assert await take(entry) == [11]
            for end in sent[:]:
                end.pause_writing()
            pair.give(2, sequence, 12)
            pair.submit("third")
            assert len(sent) == 2
            for end in sent[:]:
                end.resume_writing()
            pair.give(3, sequence, 13)
            found = list[int]()
            while len(found) < 2:
                found += await take(entry)
            assert found == [12, 13], "the order stays"
            assert (await pair.submitted.get()).spec.request_id == "third"
            assert not first.is_ended

    run(test())


def test_one_message_that_takes_long_is_written_in_an_iteration_of_the_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To encode one may take a millisecond; a request has up to hundreds of sequences, a step as many reports."""
    iteration, sent_in, send, clock = [0], list[tuple[StreamSocket, int]](), StreamSocket.send, [1.0]

    def note_and_send(end: StreamSocket, message: bytes) -> None:
        clock[0] += 0.001
        sent_in.append((end, iteration[0]))
        send(end, message)

    async def count_iterations() -> None:
        while True:
            iteration[0] += 1
            await asyncio.sleep(0)

    async def test() -> None:
        counting = asyncio.create_task(count_iterations())
        async with connected(tmp_path) as pair:
            entry, *_ = [pair.submit(f"r{i}") for i in range(40)]
            sequence, *_ = [await pair.submitted.get() for _ in range(40)]
            for token_id in range(10, 50):
                pair.give(token_id, sequence, token_id)
            found: list[int] = []
            while len(found) < 40:
                found += await take(entry)
            assert len(sent_in) == len(set(sent_in)) >= 80
            counting.cancel()

    monkeypatch.setattr(StreamSocket, "send", note_and_send)
    monkeypatch.setattr(stream_socket, "time", SimpleNamespace(thread_time=lambda: clock[0]))
    run(test())
