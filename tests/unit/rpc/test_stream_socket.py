"""The socket beside a stream: what one end sends the other receives, in order, until either closes it or dies."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import random
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from types import SimpleNamespace
from typing import Any

import pytest
import uvloop

from services.common.errors import PeerError
from services.rpc import stream_socket
from services.rpc.stream_socket import SocketOffer, StreamSocket, read_offer
from tests.support.cluster import REPOSITORY
from tests.support.running_gateway import until

TIMEOUT_S = 60.0
MAX_MESSAGE_BYTES = 2**22


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), TIMEOUT_S))


class Server:
    """The server's end, which keeps what it receives."""

    def __init__(self, max_message_bytes: int = MAX_MESSAGE_BYTES) -> None:
        self.received: list[bytes] = []
        self.lost: asyncio.Queue[PeerError] = asyncio.Queue()
        self.offer = SocketOffer(self.received.append, self.lost.put_nowait, max_message_bytes)

    @property
    def description(self) -> str:
        found = read_offer(self.offer.metadata)
        assert found is not None
        return found

    async def connected(self) -> StreamSocket:
        while self.offer.connected is None:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        return self.offer.connected


@contextlib.asynccontextmanager
async def pair(receive: Callable[[bytes], None], limit: int = MAX_MESSAGE_BYTES) -> AsyncIterator[tuple[Server, Any]]:
    """A server, and a client's end that passes its messages to `receive`."""
    server = Server(limit)
    client = await StreamSocket.reach(server.description, receive, limit)
    try:
        yield server, client
    finally:
        client.close()
        await server.offer.close()


def test_messages_of_any_size_arrive_in_order_in_both_directions() -> None:
    sizes = [0, 1, 700, 2**16, MAX_MESSAGE_BYTES, 3, 2**20, 0, 5]
    messages = [random.Random(index).randbytes(size) for index, size in enumerate(sizes)]

    async def test() -> None:
        answers: list[bytes] = []
        async with pair(answers.append) as (server, client):
            for message in messages:
                client.send(message)
                (await server.connected()).send(message[::-1])
            await until(lambda: len(server.received) == len(answers) == len(messages))
            assert server.received == messages
            assert answers == [each[::-1] for each in messages]

    run(test)


def test_who_does_not_know_the_secret_gets_nothing_and_keeps_nobody_away() -> None:
    async def test() -> None:
        server = Server()
        name = server.description.partition(":")[0]
        answers: list[bytes] = []
        with pytest.raises(OSError, match="closed"):
            await StreamSocket.reach(f"{name}:{'0' * 32}", answers.append, MAX_MESSAGE_BYTES)
        client = await StreamSocket.reach(server.description, answers.append, MAX_MESSAGE_BYTES)
        client.send(b"known")
        await until(lambda: server.received == [b"known"])
        assert not answers
        client.close()
        await server.offer.close()

    run(test)


def test_a_client_that_says_nothing_is_turned_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_socket, "SECRET_TIMEOUT_S", 0.05)

    async def test() -> None:
        server = Server()
        silent = socket.socket(socket.AF_UNIX)
        silent.connect("\0" + server.description.partition(":")[0])
        silent.settimeout(TIMEOUT_S)
        assert await asyncio.to_thread(silent.recv, 1) == b""
        silent.close()
        client = await StreamSocket.reach(server.description, bytes, MAX_MESSAGE_BYTES)
        client.close()
        await server.offer.close()

    run(test)


@pytest.mark.parametrize("run_loop", [asyncio.run, uvloop.run])
def test_what_the_peer_sent_before_it_went_is_received_though_a_write_finds_it_gone(run_loop: Any) -> None:
    async def test() -> None:
        received: list[bytes] = []
        own, peer = socket.socketpair()
        own.setblocking(False)
        end = await StreamSocket.open(own, b"", received.append, MAX_MESSAGE_BYTES)
        peer.send(bytes(4))
        await end.wait_greeted(TIMEOUT_S)
        peer.send(b"\0\0\0\5token" + b"\0\0\0\x08farewell")
        peer.close()
        end.send(b"a request")
        await asyncio.wait_for(end.closed, TIMEOUT_S)
        assert received == [b"token", b"farewell"]

    run_loop(test())


def test_a_message_that_comes_as_the_offer_ends_is_not_received_without_the_secret() -> None:
    async def test() -> None:
        server = Server()
        with socket.socket(socket.AF_UNIX) as stranger:
            stranger.connect("\0" + server.description.partition(":")[0])
            await asyncio.sleep(0.05)  # until it is accepted
            stranger.send(b"\0\0\0\6forged")
            await server.offer.close()
        assert not server.received

    uvloop.run(asyncio.wait_for(test(), TIMEOUT_S))


def test_a_stranger_can_fill_no_memory() -> None:
    async def test() -> None:
        server = Server()
        stranger = socket.socket(socket.AF_UNIX)
        stranger.connect("\0" + server.description.partition(":")[0])
        stranger.settimeout(TIMEOUT_S)
        stranger.send((MAX_MESSAGE_BYTES).to_bytes(4, "big"))  # the length of a message that is allowed later
        assert await asyncio.to_thread(stranger.recv, 1) == b"", "it is not turned away"
        stranger.close()
        await server.offer.close()

    run(test)


def test_a_client_that_the_server_cannot_accept_goes_on_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_socket, "HELLO_TIMEOUT_S", TIMEOUT_S)

    async def refuse(*_: object) -> None:
        raise OSError(24, "Too many open files")

    async def test() -> None:
        server = Server()
        monkeypatch.setattr(asyncio.get_running_loop(), "sock_accept", refuse)
        with pytest.raises(ConnectionError):
            await StreamSocket.reach(server.description, bytes, MAX_MESSAGE_BYTES)
        await server.offer.close()

    run(test)


def test_an_offer_of_another_machine_or_of_an_ended_stream_cannot_be_reached() -> None:
    async def test() -> None:
        server = Server()
        await server.offer.close()
        with pytest.raises(OSError, match="refused"):
            await StreamSocket.reach(server.description, bytes, MAX_MESSAGE_BYTES)

    run(test)


def test_a_message_above_the_limit_ends_it_with_both_numbers() -> None:
    async def test() -> None:
        async with pair(bytes, limit=100) as (server, client):
            client.send(bytes(101))
            error = await server.lost.get()
            assert "101 bytes" in str(error) and "limit is 100" in str(error)
            await client.closed
            with pytest.raises(PeerError):
                await client.drain()
            assert not server.received

    run(test)


@pytest.mark.parametrize("run_loop", [asyncio.run, uvloop.run])
def test_a_message_after_the_end_is_dropped_and_drain_says_so(run_loop: Callable[[Any], None]) -> None:
    """Services use uvloop, whose transports cannot be written to from the moment in which the peer has gone."""

    async def test() -> None:
        async with pair(bytes) as (server, client):
            (await server.connected()).close()
            while not client.closed.done():
                client.send(b"too late")
                await asyncio.sleep(0)
            client.send(b"too late")
            with pytest.raises(PeerError, match="has closed it"):
                await client.drain()

    run_loop(asyncio.wait_for(test(), TIMEOUT_S))


def test_an_error_of_the_receiver_ends_it() -> None:
    def refuse(message: bytes) -> None:
        raise ValueError(f"no {message.decode()}")

    async def test() -> None:
        async with pair(refuse) as (server, client):
            (await server.connected()).send(b"thanks")
            await client.closed
            assert str(client.error) == "no thanks"
            await server.lost.get()

    run(test)


@pytest.mark.parametrize(("took_s", "most_in_a_row"), [(0.001, 1), (0.000_6, 1), (0.000_05, 10)])
def test_the_event_loop_does_other_work_between_messages_that_come_together(
    monkeypatch: pytest.MonkeyPatch, took_s: float, most_in_a_row: int
) -> None:
    """Between any two that take long, and after some of those that take little."""
    turns, clock = list[str](), [1.0]

    def receive(message: bytes) -> None:
        turns.append(message.decode())
        clock[0] += took_s

    async def test() -> None:
        async with pair(receive) as (server, _):
            end = await server.connected()
            monkeypatch.setattr(stream_socket, "time", SimpleNamespace(thread_time=lambda: clock[0]))
            for number in range(40):
                end.send(str(number).encode())
            while len(turns) < 40 + turns.count("other"):
                if turns:
                    turns.append("other")
                await asyncio.sleep(0)

    run(test)
    assert [turn for turn in turns if turn != "other"] == [str(number) for number in range(40)]
    in_a_row = [len(list(group)) for is_other, group in itertools.groupby(turns, "other".__eq__) if not is_other]
    assert max(in_a_row) in (most_in_a_row, most_in_a_row + 1) if most_in_a_row > 1 else set(in_a_row) == {1}


@pytest.mark.parametrize(("took_s", "most_in_a_row"), [(0.001, 1), (0.000_05, 12)])
def test_the_event_loop_does_other_work_while_many_messages_are_sent(
    monkeypatch: pytest.MonkeyPatch, took_s: float, most_in_a_row: int
) -> None:
    turns, clock = list[str](), [1.0]

    async def test() -> None:
        async with pair(bytes) as (server, client):
            monkeypatch.setattr(stream_socket, "time", SimpleNamespace(thread_time=lambda: clock[0]))

            async def send() -> None:
                for number in range(40):
                    clock[0] += took_s  # to encode it
                    client.send(str(number).encode())
                    turns.append("sent")
                    await client.drain()

            sending = asyncio.create_task(send())
            while not sending.done():
                turns.append("other")
                await asyncio.sleep(0)
            await until(lambda: server.received == [str(number).encode() for number in range(40)])

    run(test)
    in_a_row = [len(list(group)) for is_other, group in itertools.groupby(turns, "other".__eq__) if not is_other]
    assert sum(in_a_row) == 40 and max(in_a_row) <= most_in_a_row
    assert most_in_a_row == 1 or len(in_a_row) < 10


def test_a_sender_waits_for_a_receiver_that_is_busy_with_many_messages() -> None:
    message = bytes(2**16)

    async def test() -> None:
        async with pair(bytes) as (server, client):
            receiver = await server.connected()
            receiver._transport.pause_reading()  # as for a process that is stopped
            num_sent = 0
            with contextlib.suppress(TimeoutError):
                while num_sent < 1000:
                    client.send(message)
                    async with asyncio.timeout(0.2):
                        await client.drain()
                    num_sent += 1
            assert num_sent < 1000, "nothing limits what is kept for a peer that does not read"
            receiver._transport.resume_reading()
            await client.drain()
            await until(lambda: len(server.received) == num_sent + 1)

    run(test)


SENDER = """
import asyncio, sys
from services.rpc.stream_socket import StreamSocket
async def send():
    end = await StreamSocket.reach(sys.argv[1], bytes, 2**20)
    for number in range(3000):
        end.send(b"%d" % number)
    while end._transport.get_write_buffer_size():
        await asyncio.sleep(0.001)
    print("sent", flush=True)
    await asyncio.sleep(60)
asyncio.run(send())
"""


def test_what_a_process_sent_before_it_was_killed_arrives_before_the_loss_is_told() -> None:
    async def test() -> None:
        server = Server()
        command = [sys.executable, "-c", SENDER, server.description]
        sender = subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE)  # noqa: ASYNC220  it only starts
        assert sender.stdout is not None
        try:
            assert await asyncio.to_thread(sender.stdout.readline) == b"sent\n"
            os.kill(sender.pid, signal.SIGKILL)
            await server.lost.get()
            assert server.received == [b"%d" % number for number in range(3000)]
        finally:
            sender.kill()
            sender.wait()
            sender.stdout.close()
            await server.offer.close()

    run(test)


def test_closing_waits_until_the_last_message_is_written() -> None:
    async def test() -> None:
        server = Server()
        answers: list[bytes] = []
        client = await StreamSocket.reach(server.description, answers.append, MAX_MESSAGE_BYTES)
        (await server.connected()).send(bytes(MAX_MESSAGE_BYTES))
        await server.offer.close()
        await client.closed
        assert answers == [bytes(MAX_MESSAGE_BYTES)]

    run(test)


@pytest.mark.parametrize("run_loop", [asyncio.run, uvloop.run])
def test_closing_gives_up_a_client_that_has_stopped(run_loop: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_socket, "CLOSE_TIMEOUT_S", 0.05)

    async def test() -> None:
        server = Server()
        client = await StreamSocket.reach(server.description, bytes, MAX_MESSAGE_BYTES)
        client._transport.pause_reading()
        end = await server.connected()
        end.send(bytes(MAX_MESSAGE_BYTES))
        await asyncio.wait_for(server.offer.close(), TIMEOUT_S / 2)
        await asyncio.wait_for(end.closed, TIMEOUT_S / 2)
        client.abort()

    run_loop(test())
