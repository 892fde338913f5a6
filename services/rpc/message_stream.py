"""`MessageStream`: whole messages between the event loops of two processes of one machine, beside a call of gRPC.

A message by gRPC also passes a thread of gRPC on either side, which takes it some tenths of a millisecond. Who makes
a call offers a socket in its metadata (`StreamOffer`); the server connects to it and says so in its own metadata. Then
all messages of the call go by the socket, and the call itself only tells when the stream ends, and why.

The socket has an abstract name (see unix(7)), which leaves nothing behind however a process ends. Both sides talk to
processes of their own user alone. A server on another machine, or in another network namespace, declines.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
import struct
from collections.abc import Iterable

from services.common.errors import PeerError

_KEY = "message-socket"  # in the metadata of a call: the name; in those of the answer: that it is used
TAKEN = ((_KEY, "taken"),)
_PREFIX = "twostroke-"
_CREDENTIALS = struct.Struct("3i")  # process, user, group
_LENGTH_BYTES = 4

Metadata = Iterable[tuple[str, str | bytes]]


class StreamOffer:
    """A socket that waits for one connection. The owner calls `close`."""

    def __init__(self) -> None:
        """Raises OSError if there can be no socket."""
        self._name = f"{_PREFIX}{secrets.token_hex(16)}"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            self._socket.bind(f"\0{self._name}")
            self._socket.listen(1)
        except BaseException:
            self.close()
            raise

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """What the call needs in its metadata."""
        return ((_KEY, self._name),)

    async def accept(self, timeout_s: float, max_message_bytes: int) -> MessageStream:
        """The stream to the server, which has connected. Other users are sent away. Raises `PeerError`."""
        try:
            async with asyncio.timeout(timeout_s):
                return await _open(await self._accept_own(), max_message_bytes)
        except (TimeoutError, OSError) as error:
            raise PeerError(f"the socket of the stream has no connection within {timeout_s:g} s: {error!r}") from error

    def close(self) -> None:
        """Nobody can connect any more. May be called again."""
        self._socket.close()

    async def _accept_own(self) -> socket.socket:
        while True:
            connected, _ = await asyncio.get_running_loop().sock_accept(self._socket)
            if _is_of_own_user(connected):
                return connected
            connected.close()


def is_taken(metadata: Metadata) -> bool:
    """Whether the server has connected to the offer, by the initial metadata of its answer."""
    return any(key == _KEY for key, _ in metadata)


async def take_offer(metadata: Metadata, max_message_bytes: int) -> MessageStream | None:
    """Connects to the socket that a call offers; None if there is no offer, or the socket is elsewhere or another
    user's. Otherwise `TAKEN` belongs into the initial metadata of the answer.
    """
    name = next((value for key, value in metadata if key == _KEY), None)
    if not isinstance(name, str) or not name.startswith(_PREFIX):
        return None
    connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        connected.connect(f"\0{name}")  # never blocks: it is refused at once if nobody listens, or too many wait
        if not _is_of_own_user(connected):
            raise PermissionError("it is another user's")
    except OSError:
        connected.close()
        return None
    return await _open(connected, max_message_bytes)


class MessageStream:
    """One end. `read` and `write` are for one task each; both let other tasks of the event loop have a turn."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, max_message_bytes: int) -> None:
        self._reader = reader
        self._writer = writer
        self._max_message_bytes = max_message_bytes

    async def read(self) -> bytes | None:
        """The next message; None if the other end is closed. Raises `PeerError` for one that is too large or breaks
        off.
        """
        try:
            num_bytes = int.from_bytes(await self._reader.readexactly(_LENGTH_BYTES), "little")
            if num_bytes > self._max_message_bytes:
                raise PeerError(f"a message has {num_bytes} bytes, the limit is {self._max_message_bytes}")
            message = await self._reader.readexactly(num_bytes)
        except asyncio.IncompleteReadError as error:
            if error.partial or error.expected != _LENGTH_BYTES:
                raise PeerError("the other end was closed within a message") from error
            return None
        except OSError:
            return None
        await asyncio.sleep(0)  # if more have arrived, nothing above waits
        return message

    async def write(self, message: bytes) -> None:
        """Sends a message; waits while the other end does not read. Raises `PeerError` if it is closed."""
        try:
            self._writer.write(len(message).to_bytes(_LENGTH_BYTES, "little") + message)
            await self._writer.drain()
        except OSError as error:
            raise PeerError(f"the other end was closed: {error}") from error
        await asyncio.sleep(0)

    def close(self) -> None:
        """Sends what has been written, and ends both directions. May be called again."""
        with contextlib.suppress(OSError):
            self._writer.close()


async def _open(connected: socket.socket, max_message_bytes: int) -> MessageStream:
    return MessageStream(*await asyncio.open_unix_connection(sock=connected), max_message_bytes)


def _is_of_own_user(connected: socket.socket) -> bool:
    credentials = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(credentials)
    return user == os.geteuid()
