"""What a request has of its connection: whether the client is still there, and what writes without waiting for it.

Work is cancelled when its client disconnects, so that no step runs for a request that nobody waits for. While the body
of a request waits for memory nothing of its connection is read, so that its end is not seen there: `Hangups` watches it
instead. All of this runs in the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import select
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import structlog
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from services.gateway.http.json_pieces import json_line

log = structlog.get_logger()


async def while_connected(scope: Scope, receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Does the work of answering a request. If the client disconnects first, cancels it and returns."""
    task, is_over, has_gone = asyncio.current_task(), False, False
    assert task is not None, "a coroutine runs in a task"

    def cancel_work(_: asyncio.Task[None]) -> None:
        nonlocal has_gone
        if not is_over:
            has_gone = True
            task.cancel()

    watching = asyncio.create_task(_wait_disconnect(receive))
    watching.add_done_callback(cancel_work)
    try:
        await work
    except asyncio.CancelledError:
        if not has_gone or task.uncancel():
            raise
        log.debug("client is gone", request_id=scope["state"]["request_id"])
    finally:
        is_over = True
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)


async def _wait_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class Hangups:
    """Tells when the other end of a socket has gone, whose data nobody reads meanwhile."""

    def __init__(self) -> None:
        self._epoll: select.epoll | None = None  # from the first that is watched on
        self._watched = dict[int, Callable[[], None]]()  # by descriptor

    @contextlib.contextmanager
    def watching(self, descriptor: int, on_hangup: Callable[[], None]) -> Iterator[None]:
        """Calls `on_hangup` once within the context, after the other end is closed. One context a descriptor."""
        if self._epoll is None:
            self._epoll = select.epoll()
            asyncio.get_running_loop().add_reader(self._epoll.fileno(), self._look)
        self._watched[descriptor] = on_hangup
        self._epoll.register(descriptor, select.EPOLLRDHUP | select.EPOLLONESHOT)
        try:
            yield
        finally:
            if self._watched.get(descriptor) is on_hangup:
                del self._watched[descriptor]
            with contextlib.suppress(OSError):  # it is closed, or of another connection by now
                self._epoll.unregister(descriptor)

    def close(self) -> None:
        """Watches nothing any more."""
        if self._epoll is not None:
            asyncio.get_running_loop().remove_reader(self._epoll.fileno())
            self._epoll.close()

    def _look(self) -> None:
        assert self._epoll is not None, "it is read"
        for descriptor, _ in self._epoll.poll(0):
            if (on_hangup := self._watched.pop(descriptor, None)) is not None:
                on_hangup()


class Connection:
    """What a request can be told of the connection that it came by."""

    def __init__(self, transport: asyncio.Transport, hangups: Hangups) -> None:
        self._transport, self._hangups = transport, hangups
        self._on_lost: Callable[[], None] | None = None

    def note_lost(self) -> None:
        """The connection has ended."""
        if self._on_lost is not None:
            self._on_lost()

    @contextlib.contextmanager
    def reads_nothing(self) -> Iterator[None]:
        """A context in which nothing is read. Raises `ClientDisconnect` as soon as the client disconnects."""
        task, has_gone = asyncio.current_task(), False
        assert task is not None, "a request runs in a task"
        if self._transport.is_closing():
            raise ClientDisconnect

        def cancel() -> None:
            nonlocal has_gone
            if not has_gone:
                has_gone = True
                task.cancel()

        self._on_lost = cancel
        try:
            with self._hangups.watching(self._transport.get_extra_info("socket").fileno(), self._transport.abort):
                yield
        except asyncio.CancelledError:
            if not has_gone or task.uncancel():
                raise
            raise ClientDisconnect from None
        finally:
            self._on_lost = None


class BodyWriter:
    """Writes pieces of a streamed body as ASGI's `send` would, for callers that are no coroutine. One per answer."""

    __slots__ = ("_cycle", "_flow", "_write")

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle, self._flow, self._write = cycle, cycle.flow, cycle.transport.write

    def can_write(self) -> bool:
        """Whether the client reads what it is sent, in chunks; if not, only `send` knows what to do."""
        cycle = self._cycle
        return not (self._flow.write_paused or cycle.disconnected) and cycle.chunked_encoding is True

    def write(self, piece: bytes) -> None:
        """Writes a piece that is not empty as a chunk (RFC 9112, section 7.1); the answer has begun and not ended."""
        self._write(b"%x\r\n%b\r\n" % (len(piece), piece))

    def text_writer(self, before: bytes, after: bytes) -> Callable[[str], None]:
        """A function that writes a text as JSON between these bytes, as `write` does. It runs for every token."""
        write_bytes, num_bytes = self._write, len(before) + len(after)

        def write_text(text: str) -> None:
            piece = json_line(text)
            write_bytes(b"%x\r\n%b%b%b\r\n" % (num_bytes + len(piece), before, piece, after))

        return write_text
