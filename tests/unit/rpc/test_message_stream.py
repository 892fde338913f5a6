"""Messages between two event loops by a socket: whole, in order, bounded in size, and from the called server alone.

The peers that die or stop are processes.
"""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import TypeVar

import pytest

from services.common.errors import PeerError
from services.rpc import message_stream
from services.rpc.message_stream import TAKEN, MessageStream, OfferLost, StreamOffer, is_taken, take_offer
from services.rpc.server import EventLoop

MAX_BYTES = 2**22
TEST_LIMIT_S = 60.0

R = TypeVar("R")


def run(test: Callable[[], Awaitable[R]]) -> R:
    with asyncio.Runner(loop_factory=EventLoop) as runner:
        return runner.run(asyncio.wait_for(test(), TEST_LIMIT_S))


@asynccontextmanager
async def ends(max_bytes: int = MAX_BYTES) -> AsyncIterator[tuple[MessageStream, MessageStream]]:
    """The side of the call, and that of the server."""
    offer = StreamOffer()
    server = take_offer(offer.metadata, max_bytes)
    assert server is not None
    caller = offer.accept(max_bytes)
    offer.close()
    try:
        yield caller, server
    finally:
        caller.close()
        server.close()


def test_messages_arrive_whole_and_in_order_in_both_directions() -> None:
    async def test() -> None:
        sent = [b"", b"a", bytes(3 * 2**20), b"b" * 70_000, b"c"]

        async def write(stream: MessageStream) -> None:
            for each in sent:
                await stream.write(each)

        async def read(stream: MessageStream) -> list[bytes | None]:
            return [await stream.read() for _ in sent]

        async with ends() as (caller, server):
            *_, first, second = await asyncio.gather(write(caller), write(server), read(caller), read(server))
            assert first == second == sent

    run(test)


def test_the_end_of_the_other_side_is_none_after_what_it_has_sent() -> None:
    async def test() -> None:
        async with ends() as (caller, server):
            await server.write(b"last")
            server.close()
            assert [await caller.read(), await caller.read()] == [b"last", None]
            with pytest.raises(PeerError, match="closed"):
                while True:
                    await caller.write(b"x")

    run(test)


def test_a_message_that_is_too_large_is_refused_before_it_is_read() -> None:
    async def test() -> None:
        async with ends(max_bytes=100) as (caller, server):
            await caller.write(bytes(100))
            await caller.write(bytes(101))
            assert await server.read() == bytes(100)
            with pytest.raises(PeerError, match="has 101 bytes, the limit is 100"):
                await server.read()

    run(test)


def test_a_message_that_breaks_off_is_an_error() -> None:
    async def test() -> None:
        for part in (b"\5\0", b"\4\0\0\0", b"\5\0\0\0abc"):
            async with ends() as (caller, server):
                caller._socket.send(part)
                caller.close()
                with pytest.raises(PeerError, match="within a message"):
                    await server.read()

    run(test)


def test_who_writes_waits_while_the_other_side_does_not_read() -> None:
    async def test() -> None:
        num_written, num_messages, message = 0, 256, bytes(2**18)

        async def write(stream: MessageStream) -> None:
            nonlocal num_written
            for _ in range(num_messages):
                await stream.write(message)
                num_written += 1

        async with ends() as (caller, server):
            writing = asyncio.create_task(write(caller))
            last = -1
            while last != num_written:
                last = num_written
                await asyncio.sleep(0.05)
            assert num_written < num_messages // 2  # the rest of 64 MiB is not kept in memory
            for _ in range(num_messages):
                assert await server.read() == message
            await writing

    run(test)


def test_other_tasks_have_a_turn_between_messages_that_are_there() -> None:
    async def test() -> None:
        async with ends() as (caller, server):
            for _ in range(20):
                await caller.write(b"x")
            await server.read()
            await asyncio.sleep(0.05)  # the rest is there, too
            num_turns, is_over = 0, False

            async def count() -> None:
                nonlocal num_turns
                while not is_over:
                    num_turns += 1
                    await asyncio.sleep(0)

            counting = asyncio.create_task(count())
            for _ in range(19):
                await server.read()
            is_over = True
            await counting
            assert num_turns >= 19

    run(test)


def test_an_offer_is_declined_if_its_socket_is_elsewhere_or_another_users(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        offer = StreamOffer()
        metadata = offer.metadata
        offer.close()
        assert take_offer(metadata, MAX_BYTES) is None
        for other in ((), (("message-socket", "elsewhere"),), (("message-socket", b"x"),), (("user-agent", "x"),)):
            assert take_offer(other, MAX_BYTES) is None
        offer = StreamOffer()
        monkeypatch.setattr(message_stream, "_is_of_own_user", lambda connected: False)
        assert take_offer(offer.metadata, MAX_BYTES) is None
        offer.close()

    run(test)


def test_another_user_who_connects_first_is_sent_away(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        offer = StreamOffer()
        stranger = take_offer(offer.metadata, MAX_BYTES)
        server = take_offer(offer.metadata, MAX_BYTES)
        assert stranger is not None and server is not None
        found = iter((False, True))
        monkeypatch.setattr(message_stream, "_is_of_own_user", lambda connected: next(found))
        caller = offer.accept(MAX_BYTES)
        await server.write(b"hello")
        assert await caller.read() == b"hello"
        assert await stranger.read() is None
        for each in (offer, stranger, server, caller):
            each.close()

    run(test)


@pytest.mark.parametrize("says", [None, b"", b"0" * 32, b"0" * 31])  # None: it waits
def test_a_stranger_without_the_secret_who_connects_first_is_sent_away(says: bytes | None) -> None:
    async def test() -> None:
        offer = StreamOffer()
        stranger = connect(offer)
        if says is not None:
            stranger.sendall(says)
            stranger.shutdown(socket.SHUT_WR)
        server = take_offer(offer.metadata, MAX_BYTES)
        assert server is not None
        caller = offer.accept(MAX_BYTES)
        await caller.write(b"secret prompt")
        assert await server.read() == b"secret prompt"
        assert received_by(stranger) == b""
        for each in (offer, stranger, server, caller):
            each.close()

    run(test)


def test_strangers_who_take_all_places_make_the_server_decline() -> None:
    async def test() -> None:
        offer, strangers = StreamOffer(), []
        while True:
            try:
                strangers.append(connect(offer))
            except BlockingIOError:
                break
        assert take_offer(offer.metadata, MAX_BYTES) is None
        with pytest.raises(OfferLost, match="strangers"):
            offer.accept(MAX_BYTES)
        for each in (offer, *strangers):
            each.close()

    run(test)


def test_an_offer_that_is_not_used_is_lost_at_once() -> None:
    async def test() -> None:
        offer = StreamOffer()
        with pytest.raises(OfferLost, match="does not"):
            offer.accept(MAX_BYTES)
        offer.close()

    run(test)


def test_a_peer_killed_with_unread_messages_is_a_peer_error() -> None:
    async def test() -> None:
        with peer_process(b"first") as (caller, peer):
            assert await caller.read() == b"first"
            for _ in range(3):
                await caller.write(b"unread")  # so that the kernel resets the connection
            reading = asyncio.create_task(caller.read())
            await asyncio.sleep(0.05)  # it waits for the socket
            kill(peer)
            assert await reading is None
            for _ in range(3):
                with pytest.raises(PeerError, match="closed"):
                    await caller.write(b"x")
            assert await caller.read() is None

    run(test)


def test_who_waits_to_write_to_a_peer_that_is_killed_gets_a_peer_error() -> None:
    async def test() -> None:
        with peer_process() as (caller, peer):
            writing = asyncio.create_task(caller.write(bytes(MAX_BYTES)))
            await asyncio.sleep(0.05)
            kill(peer)
            with pytest.raises(PeerError, match="closed"):
                await writing

    run(test)


def test_what_a_killed_peer_has_sent_is_read_after_a_write_that_failed() -> None:
    async def test() -> None:
        sent = [b"%d" % i for i in range(50)]
        with peer_process(*sent) as (caller, peer):
            await caller.write(b"unread")
            assert await caller.read() == sent[0]
            kill(peer)
            with pytest.raises(PeerError, match="closed"):
                while True:
                    await caller.write(b"x")
            assert [await caller.read() for _ in sent] == [*sent[1:], None]

    run(test)


@pytest.mark.parametrize("closes", [False, True])
def test_a_stream_to_a_stopped_peer_ends_at_once(closes: bool) -> None:
    async def test() -> None:
        with peer_process() as (caller, peer):
            peer.send_signal(signal.SIGSTOP)
            writing = asyncio.create_task(caller.write(bytes(MAX_BYTES)))
            reading = asyncio.create_task(caller.read())
            await asyncio.sleep(0.05)
            assert not writing.done() and not reading.done()
            if closes:
                caller.close()
            else:
                caller.end()
            with pytest.raises(PeerError, match="closed"):
                await writing
            assert await reading is None
            assert (caller._socket.fileno() == -1) == closes

    run(test)


def test_what_was_sent_before_the_end_is_read_if_the_sender_has_unread_messages() -> None:
    async def test() -> None:
        async with ends() as (caller, server):
            await caller.write(b"unread")
            for _ in range(20):
                await server.write(b"token")
            await server.write(b"farewell")
            server.close()
            assert server._socket.fileno() == -1
            assert [await caller.read() for _ in range(22)] == [*[b"token"] * 20, b"farewell", None]

    run(test)


def test_a_huge_length_takes_no_memory() -> None:
    async def test() -> None:
        async with ends() as (caller, server):
            caller._socket.send(b"\xff" * 4)
            with pytest.raises(PeerError, match=f"{2**32 - 1} bytes"):
                await server.read()

    run(test)


PEER = """
import socket, sys, time
peer = socket.socket(socket.AF_UNIX)
peer.connect("\\0" + sys.argv[1])
peer.sendall(sys.argv[2].encode())
for message in sys.argv[3:]:
    peer.sendall(len(message).to_bytes(4, "little") + message.encode())
print("connected", flush=True)
time.sleep(600)
"""


@contextmanager
def peer_process(*messages: bytes) -> Iterator[tuple[MessageStream, subprocess.Popen[bytes]]]:
    """A stream to a server in a process of its own that has sent the messages, and reads nothing."""
    offer = StreamOffer()
    values = [value for _, value in offer.metadata] + [message.decode() for message in messages]
    peer = subprocess.Popen([sys.executable, "-c", PEER, *values], stdout=subprocess.PIPE)
    try:
        assert peer.stdout is not None and peer.stdout.readline() == b"connected\n"
        caller = offer.accept(MAX_BYTES)
        yield caller, peer
        caller.close()
    finally:
        offer.close()
        kill(peer)


def kill(peer: subprocess.Popen[bytes]) -> None:
    peer.kill()
    peer.wait()


def connect(offer: StreamOffer) -> socket.socket:
    """A stranger of the same user, who has seen the socket's name."""
    stranger = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        stranger.connect(f"\0{offer.metadata[0][1]}")
    except BaseException:
        stranger.close()
        raise
    return stranger


def received_by(stranger: socket.socket) -> bytes:
    """What there is to read once the other end is closed."""
    try:
        return stranger.recv(100)
    except ConnectionResetError:
        return b""


def test_the_answer_says_whether_the_offer_is_taken() -> None:
    assert is_taken((("dense-info-bin", b""), *TAKEN))
    assert not is_taken((("dense-info-bin", b""),))
