"""The messages of a gRPC stream by a socket beside it, where both processes are on one host.

gRPC takes 0.2 to 0.45 ms for a message from one event loop to another, a socket half of that or less. The stream stays
open: it says who the peer is, and why it ends. Its server names a socket in the initial metadata. A client that reaches
it sends and receives all messages there; one in another container or on another machine does not, and uses the stream.

A frame is the length of its message, then the message. The socket's name is in Linux's abstract namespace, which other
users of the host see, so the client must also know the secret from the metadata.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
import struct
import time
from collections.abc import Callable, Iterable
from typing import Final, Self, cast

import structlog

from services.common.errors import PeerError

log = structlog.get_logger()

KEY: Final = "stream-socket"  # initial metadata: the name and the secret
HELLO_TIMEOUT_S: Final = 5.0  # for the server's first message, whose event loop may be busy
SECRET_TIMEOUT_S: Final = 1.0  # for the client's, which it sends at once; others wait meanwhile
CLOSE_TIMEOUT_S: Final = 5.0  # for the client to read the last messages; one that has stopped never does
_HELLO: Final = b""  # the server's first message
_LENGTH: Final = struct.Struct("!I")
_MAX_WAITING_BYTES: Final = 2**20  # of complete messages, about
_SLICE_S: Final = 0.000_5  # of processor time: after it messages wait for the next iteration of the event loop

Receive = Callable[[bytes], None]


class StreamSocket(asyncio.Protocol):
    """One end of a socket that carries messages. For one event loop."""

    def __init__(self, hello: bytes, receive: Receive, max_message_bytes: int) -> None:
        """`hello`: what the peer's first message must be. `receive` gets all others; if it raises, the socket closes.

        `max_message_bytes`: of a received message.
        """
        loop = asyncio.get_running_loop()
        self.greeted: asyncio.Future[None] = loop.create_future()  # done with the peer's first message, or without it
        self.closed: asyncio.Future[None] = loop.create_future()  # either end has closed it; what had come is handled
        self.error: Exception | None = None  # why this end has closed it; None: nothing was wrong
        self._hello, self._receive, self._max_message_bytes = hello, receive, max_message_bytes
        self._buffer = bytearray()  # frames that wait, and the beginning of one
        self._is_working = False  # the next one has its iteration of the event loop
        self._is_lost = False  # nothing comes any more
        self._is_over = False  # this end has closed it, and receives nothing any more
        self._transport: asyncio.Transport
        self._may_write = asyncio.Event()
        self._may_write.set()
        self._drained_at = 0.0  # in processor time: when others last ran because of `drain`

    @classmethod
    async def open(cls, connected: socket.socket, hello: bytes, receive: Receive, max_message_bytes: int) -> Self:
        """Takes a connected socket that does not block."""
        _, found = await asyncio.get_running_loop().create_unix_connection(
            lambda: cls(hello, receive, max_message_bytes), sock=connected
        )
        return found

    @classmethod
    async def reach(cls, offer: str, receive: Receive, max_message_bytes: int) -> Self:
        """The client's end of a socket that a server offers. Raises OSError: it is elsewhere, or takes too long."""
        name, _, secret = offer.partition(":")
        connected = socket.socket(socket.AF_UNIX)
        try:
            connected.setblocking(False)
            connected.connect(f"\0{name}")
            end = await cls.open(connected, _HELLO, receive, max_message_bytes)
        except BaseException:
            connected.close()
            raise
        try:
            end.send(secret.encode())
            await end.wait_greeted(HELLO_TIMEOUT_S)
        except BaseException:
            end.close()
            raise
        return end

    async def wait_greeted(self, timeout_s: float) -> None:
        """Waits for the peer's first message. Raises `ConnectionError` or `TimeoutError`, which are OSErrors."""
        async with asyncio.timeout(timeout_s):
            await asyncio.shield(self.greeted)  # if it were cancelled, a message that is just coming would be received
        if self.closed.done():
            raise ConnectionError(f"the socket was closed: {self.error or 'by the other end'}")

    def send(self, message: bytes) -> None:
        """Sends a message, or keeps it if the peer reads slowly: then `drain` waits. Drops it if the socket is closed.
        """
        if self._transport.is_closing():  # uvloop's then raises RuntimeError
            return
        self._transport.write(_LENGTH.pack(len(message)) + message)

    @property
    def is_read(self) -> bool:
        """Whether the peer reads what is sent: then `drain` would not wait."""
        return self._may_write.is_set()

    async def drain(self) -> None:
        """Waits until most of what was sent is written. Raises `PeerError` if the socket is closed.

        Other tasks run meanwhile, however fast the peer reads: to encode the next message may take a millisecond. Many
        that take little, such as cancellations, have one iteration of the event loop.
        """
        if time.thread_time() - self._drained_at >= _SLICE_S:
            await asyncio.sleep(0)
            self._drained_at = time.thread_time()
        await self._may_write.wait()
        if self.closed.done():
            raise PeerError(f"the other end of the stream's socket has closed it: {self.error or 'it may have ended'}")

    def close(self) -> None:
        """Closes this end when what was sent is written; nothing is received any more. May be called again."""
        self._is_over = True
        self._buffer.clear()
        self._transport.close()

    def abort(self) -> None:
        """Closes this end at once; what is not written yet is lost. May be called again."""
        self.close()
        if not self._is_lost:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is one by its methods only

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        if not self._is_working:
            self._work()

    def connection_lost(self, exc: Exception | None) -> None:
        if isinstance(exc, ConnectionError) and not self._is_over:  # of a write, before what has come was read
            self._buffer += _read_rest(self._transport.get_extra_info("socket").fileno())
        self.error = self.error or exc
        self._is_lost = True
        if not self._is_working:
            self._work()

    def pause_writing(self) -> None:
        self._may_write.clear()

    def resume_writing(self) -> None:
        self._may_write.set()

    def _work(self) -> None:
        """Handles some messages, however many have come: one may take a millisecond, and of others thousands come."""
        self._is_working = False
        latest = time.thread_time() + _SLICE_S
        try:
            while (end := self._frame_end()) is not None:
                if time.thread_time() >= latest:
                    self._is_working = True
                    break
                with memoryview(self._buffer) as view:
                    message = bytes(view[_LENGTH.size : end])
                del self._buffer[:end]
                self._take(message)
        except Exception as error:  # nobody awaits this call
            self.error = error
            self._is_over = True
            self._buffer.clear()
            self._transport.abort()
        if self._is_working:
            asyncio.get_running_loop().call_soon(self._work)
        elif self._is_lost:
            self._finish()
        if not self._transport.is_closing():
            self._limit_buffer()

    def _limit_buffer(self) -> None:
        """Lets the peer wait while messages do."""
        if self._is_working and len(self._buffer) > _MAX_WAITING_BYTES:
            self._transport.pause_reading()
        elif not self._transport.is_reading():
            self._transport.resume_reading()

    def _finish(self) -> None:
        for each in (self.closed, self.greeted):
            if not each.done():
                each.set_result(None)
        self._may_write.set()

    def _frame_end(self) -> int | None:
        """Where the first frame of the buffer ends; None: not all of it has come."""
        if len(self._buffer) < _LENGTH.size:
            return None
        [num_bytes] = _LENGTH.unpack_from(self._buffer)
        most = self._max_message_bytes if self.greeted.done() else len(self._hello)
        if num_bytes > most:
            raise PeerError(f"a message has {num_bytes} bytes, the limit is {most}")
        end = _LENGTH.size + num_bytes
        return None if len(self._buffer) < end else end

    def _take(self, message: bytes) -> None:
        if self.greeted.done():
            self._receive(message)
        elif secrets.compare_digest(message, self._hello):
            self.greeted.set_result(None)
        else:
            raise PeerError("the peer does not know the secret of the stream's socket")


class SocketOffer:
    """A server's socket for the client of one stream. The server calls `close` when the stream ends."""

    def __init__(self, receive: Receive, lose: Callable[[PeerError], None], max_message_bytes: int) -> None:
        """`receive` gets the messages of a client that comes, `lose` why it has gone.

        Raises OSError if the system has no descriptor left.
        """
        self.connected: StreamSocket | None = None  # once the client has come; then all messages to it go there
        self._secret = secrets.token_hex(16)
        self._name = f"twostroke-stream-{secrets.token_hex(8)}"
        self._listener = socket.socket(socket.AF_UNIX)
        try:
            self._listener.setblocking(False)
            self._listener.bind(f"\0{self._name}")
            self._listener.listen()
        except BaseException:
            self._listener.close()
            raise
        self._serving = asyncio.create_task(self._serve(receive, lose, max_message_bytes))

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """What tells the client of it."""
        return ((KEY, f"{self._name}:{self._secret}"),)

    async def close(self) -> None:
        """Lets nobody connect any more, and waits until what was sent is written, at most `CLOSE_TIMEOUT_S` seconds.

        May be called again.
        """
        self._serving.cancel()
        await asyncio.wait([self._serving])  # closed before, the number of the listener might be another file's
        self._listener.close()
        if self.connected is not None:
            self.connected.close()
            await asyncio.wait([self.connected.closed], timeout=CLOSE_TIMEOUT_S)
            self.connected.abort()

    async def _serve(self, receive: Receive, lose: Callable[[PeerError], None], max_message_bytes: int) -> None:
        try:
            self.connected = end = await self._accept(receive, max_message_bytes)
        except OSError as error:  # no descriptors: the client goes on with the stream
            log.warning("nobody can connect to a stream's socket", reason=str(error))
            self._listener.close()  # a client that waits for its turn knows it at once
            return
        await asyncio.shield(end.closed)
        lose(PeerError(f"the other end of the stream's socket has closed it: {end.error or 'it may have ended'}"))

    async def _accept(self, receive: Receive, max_message_bytes: int) -> StreamSocket:
        """Waits for the client that knows the secret."""
        while True:
            connected, _ = await asyncio.get_running_loop().sock_accept(self._listener)
            end = await StreamSocket.open(connected, self._secret.encode(), receive, max_message_bytes)
            try:
                await end.wait_greeted(SECRET_TIMEOUT_S)
            except OSError:  # another user, or a client that has gone
                end.close()
                continue
            except BaseException:
                end.close()
                raise
            end.send(_HELLO)
            return end


def _read_rest(descriptor: int) -> bytes:
    """What a peer that has gone had sent."""
    parts = []
    with contextlib.suppress(OSError):  # there is no more
        while part := os.read(descriptor, _MAX_WAITING_BYTES):
            parts.append(part)
    return b"".join(parts)


def read_offer(metadata: Iterable[tuple[str, str | bytes]]) -> str | None:
    """The offer in a stream's initial metadata, for `StreamSocket.reach`; None: there is none."""
    for key, value in metadata:
        if key == KEY and isinstance(value, str):
            return value
    return None
