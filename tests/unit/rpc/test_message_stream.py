"""Messages between two event loops by a socket: whole, in order, bounded in size, and from the own user alone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

import pytest

from services.common.errors import PeerError
from services.rpc import message_stream
from services.rpc.message_stream import TAKEN, MessageStream, StreamOffer, is_taken, take_offer

MAX_BYTES = 2**22
TEST_LIMIT_S = 60.0

R = TypeVar("R")


def run(test: Callable[[], Awaitable[R]]) -> R:
    return asyncio.run(asyncio.wait_for(test(), TEST_LIMIT_S))


@asynccontextmanager
async def ends(max_bytes: int = MAX_BYTES) -> AsyncIterator[tuple[MessageStream, MessageStream]]:
    """The side of the call, and that of the server."""
    offer = StreamOffer()
    server = await take_offer(offer.metadata, max_bytes)
    assert server is not None
    caller = await offer.accept(TEST_LIMIT_S, max_bytes)
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
        for part in (b"\5\0", b"\5\0\0\0", b"\5\0\0\0abc"):
            async with ends() as (caller, server):
                caller._writer.write(part)
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
        assert await take_offer(metadata, MAX_BYTES) is None
        for other in ((), (("message-socket", "elsewhere"),), (("message-socket", b"x"),), (("user-agent", "x"),)):
            assert await take_offer(other, MAX_BYTES) is None
        offer = StreamOffer()
        monkeypatch.setattr(message_stream, "_is_of_own_user", lambda connected: False)
        assert await take_offer(offer.metadata, MAX_BYTES) is None
        offer.close()

    run(test)


def test_another_user_who_connects_first_is_sent_away(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        offer = StreamOffer()
        stranger = await take_offer(offer.metadata, MAX_BYTES)
        server = await take_offer(offer.metadata, MAX_BYTES)
        assert stranger is not None and server is not None
        found = iter((False, True))
        monkeypatch.setattr(message_stream, "_is_of_own_user", lambda connected: next(found))
        caller = await offer.accept(TEST_LIMIT_S, MAX_BYTES)
        await server.write(b"hello")
        assert await caller.read() == b"hello"
        assert await stranger.read() is None
        for each in (offer, stranger, server, caller):
            each.close()

    run(test)


def test_waiting_for_a_connection_has_a_limit() -> None:
    async def test() -> None:
        offer = StreamOffer()
        with pytest.raises(PeerError, match=r"within 0\.01 s"):
            await offer.accept(0.01, MAX_BYTES)
        offer.close()

    run(test)


def test_the_answer_says_whether_the_offer_is_taken() -> None:
    assert is_taken((("dense-info-bin", b""), *TAKEN))
    assert not is_taken((("dense-info-bin", b""),))
