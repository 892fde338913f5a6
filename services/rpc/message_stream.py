"""`MessageStream`: whole messages between the event loops of two processes of one machine, beside a call of gRPC.

A message by gRPC also passes a thread of gRPC on either side, which takes it some tenths of a millisecond. Who makes
a call offers a socket in its metadata (`StreamOffer`); the server connects to it and says so in its own metadata. Then
all messages of the call go by the socket, and the call itself only tells when the stream ends, and why.

The socket has an abstract name (see unix(7)), which leaves nothing behind however a process ends. Whoever shares the
network namespace sees that name, so a server also shows a secret of the call, and both sides talk to processes of their
own user alone. A server on another machine, or in another network namespace, declines.

Neither side keeps messages in buffers of its own: what is written is in the kernel, and what has arrived there stays
readable when the other side has died.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import os
import secrets
import socket
import struct
from collections.abc import Iterable

from services.common.errors import PeerError

_KEY = "message-socket"  # in the metadata of a call: the name; in those of the answer: that it is used
_SECRET_KEY = "message-socket-secret"  # in the metadata of a call: what the server sends first
TAKEN = ((_KEY, "taken"),)
_PREFIX = "twostroke-"
_SECRET_BYTES = 32
_BACKLOG = 4
_CREDENTIALS = struct.Struct("3i")  # process, user, group
_LENGTH_BYTES = 4
_RECEIVED_BYTES = 2**16  # at once, at most

Metadata = Iterable[tuple[str, str | bytes]]


class OfferLost(PeerError):
    """The server has taken the offer, but its connection is not there."""


class StreamOffer:
    """A socket that waits for one connection. The owner calls `close`."""

    def __init__(self) -> None:
        """Raises OSError if there can be no socket."""
        self._name = f"{_PREFIX}{secrets.token_hex(16)}"
        self._secret = secrets.token_hex(_SECRET_BYTES // 2)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            self._socket.bind(f"\0{self._name}")
            self._socket.listen(_BACKLOG)
        except BaseException:
            self.close()
            raise

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """What the call needs in its metadata."""
        return ((_KEY, self._name), (_SECRET_KEY, self._secret))

    def accept(self, max_message_bytes: int) -> MessageStream:
        """The stream to the server, which has said that it is connected. Raises `OfferLost`.

        Strangers are sent away. They cannot hide the server: those before it are at most as many as may wait.
        """
        try:
            for _ in range(_BACKLOG + 1):
                connected, _ = self._socket.accept()
                connected.setblocking(False)
                if _is_of_own_user(connected) and self._knows_secret(connected):
                    return MessageStream(connected, max_message_bytes)
                connected.close()
        except OSError as error:
            raise OfferLost(f"the server says that it uses the socket of the stream, but does not: {error}") from error
        raise OfferLost("only strangers use the socket of the stream")

    def close(self) -> None:
        """Nobody can connect any more. May be called again."""
        self._socket.close()

    def _knows_secret(self, connected: socket.socket) -> bool:
        """The server has sent it before it said that it is connected, so nothing waits here."""
        try:
            return hmac.compare_digest(connected.recv(_SECRET_BYTES), self._secret.encode())
        except OSError:
            return False


def is_taken(metadata: Metadata) -> bool:
    """Whether the server has connected to the offer, by the initial metadata of its answer."""
    return any(key == _KEY for key, _ in metadata)


def take_offer(metadata: Metadata, max_message_bytes: int) -> MessageStream | None:
    """Connects to the socket that a call offers; None if there is no offer, or the socket is elsewhere or another
    user's. Otherwise `TAKEN` belongs into the initial metadata of the answer.
    """
    found = dict(metadata)
    name, secret = found.get(_KEY), found.get(_SECRET_KEY)
    if not isinstance(name, str) or not name.startswith(_PREFIX) or not isinstance(secret, str):
        return None
    connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        connected.connect(f"\0{name}")  # never blocks: it is refused at once if nobody listens, or too many wait
        if not _is_of_own_user(connected):
            raise PermissionError("it is another user's")
        connected.send(secret.encode())  # into an empty buffer
    except OSError:
        connected.close()
        return None
    return MessageStream(connected, max_message_bytes)


class MessageStream:
    """One end. `read` and `write` are for one task each; both let other tasks of the event loop have a turn.

    It uses the socket itself and no transport: asyncio's discards what has arrived when a write fails, and waits with
    its end until the other side has read everything. The loop watches the socket from one message to the next, which
    `sock_recv` would begin and end for each.
    """

    def __init__(self, connected: socket.socket, max_message_bytes: int) -> None:
        """Owns `connected`, which does not block. Belongs to the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._socket = connected
        self._max_message_bytes = max_message_bytes
        self._arrived = bytearray()  # the start of the next message, or several
        self._is_watched = False  # whether the loop tells when something has arrived
        self._reading: asyncio.Future[bytes] | None = None  # of a task that waits for bytes; empty: it looks itself
        self._writing: asyncio.Future[None] | None = None  # of a task that waits for room
        self._unsent = memoryview(b"")  # what it has to write

    async def read(self) -> bytes | None:
        """The next message; None if the stream has ended. Raises `PeerError` for one that is too large or breaks
        off.
        """
        if (message := self._next_arrived()) is not None:
            await asyncio.sleep(0)
        while message is None:
            received = await self._receive()
            if not received:
                if self._arrived:
                    raise PeerError("the other end was closed within a message")
                return None
            self._arrived += received
            message = self._next_arrived()
        return message

    async def write(self, message: bytes) -> None:
        """Sends a message; waits while the other end does not read. Then it is in the kernel: the other end gets it
        even if this process ends. Raises `PeerError` if the stream has ended. A cancelled `write` breaks the stream.
        """
        data = len(message).to_bytes(_LENGTH_BYTES, "little") + message
        try:
            self._unsent = memoryview(data)[self._send(data) :]
            if not self._unsent:
                await asyncio.sleep(0)
                return
            self._writing = self._loop.create_future()
            self._loop.add_writer(self._socket, self._on_writable)
            await self._writing
        except OSError as error:
            raise PeerError(f"the other end was closed: {error}") from error

    def end(self) -> None:
        """Ends both directions at once, whatever the other side does; what has arrived can still be read."""
        with contextlib.suppress(OSError):  # it has ended already
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Ends the stream and frees the socket. The other end gets all that `write` has sent. May be called again."""
        if self._socket.fileno() < 0:
            return
        self._loop.remove_reader(self._socket)
        self._loop.remove_writer(self._socket)
        self._socket.close()
        if self._reading is not None and not self._reading.done():
            self._reading.set_result(b"")
        if self._writing is not None and not self._writing.done():
            self._writing.set_exception(OSError("by this end"))

    def _next_arrived(self) -> bytes | None:
        num_bytes = int.from_bytes(self._arrived[:_LENGTH_BYTES], "little")
        if num_bytes > self._max_message_bytes:
            raise PeerError(f"a message has {num_bytes} bytes, the limit is {self._max_message_bytes}")
        end = _LENGTH_BYTES + num_bytes
        if len(self._arrived) < end:
            return None
        with memoryview(self._arrived) as arrived:
            message = bytes(arrived[_LENGTH_BYTES:end])
        del self._arrived[:end]
        return message

    async def _receive(self) -> bytes:
        """What has arrived, in part; empty at the end."""
        while True:
            try:
                received = self._socket.recv(_RECEIVED_BYTES)
            except BlockingIOError:
                pass  # only then: the loop does not watch a socket any more on which it has seen an error
            except OSError:
                return b""
            else:
                await asyncio.sleep(0)
                return received
            if not self._is_watched:
                self._loop.add_reader(self._socket, self._on_readable)
                self._is_watched = True
            self._reading = self._loop.create_future()
            if received := await self._reading:
                return received

    def _on_readable(self) -> None:
        if self._reading is None or self._reading.done():  # it stays in the kernel, whose buffer is bounded
            self._loop.remove_reader(self._socket)
            self._is_watched = False
            return
        try:
            self._reading.set_result(self._socket.recv(_RECEIVED_BYTES))
        except OSError:
            self._reading.set_result(b"")

    def _on_writable(self) -> None:
        assert self._writing is not None
        if not self._writing.done():  # not cancelled
            try:
                self._unsent = self._unsent[self._send(self._unsent) :]
                if self._unsent:
                    return
                self._writing.set_result(None)
            except OSError as error:
                self._writing.set_exception(error)
        self._loop.remove_writer(self._socket)

    def _send(self, data: bytes | memoryview) -> int:
        """The number of bytes for which there was room. Raises OSError."""
        try:
            return self._socket.send(data)
        except BlockingIOError:
            return 0


def _is_of_own_user(connected: socket.socket) -> bool:
    credentials = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(credentials)
    return user == os.geteuid()
