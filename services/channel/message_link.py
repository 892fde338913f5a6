"""`MessageLink`: whole messages between threads of two processes of one host, without an event loop in between.

A message on the gRPC stream of plans passes the event loops of both workers, which takes it some tenths of a
millisecond and more when they are busy. Over a Unix socket the engine thread sends a plan itself, and that of the
receiver reads it; answers are handed on by a thread. Neither waits until the other has read: an engine thread reads
nothing during a step, in which it may wait for the one that sends. The attention worker offers a socket for each
attachment, beside its data region in shared memory; the dense worker connects to it.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Self

from services.channel.region import LINK_SUFFIX, NAME_PREFIX, SHM_DIR
from services.common.errors import PeerError

_HEADER = struct.Struct("!Id")  # in front of a message: its bytes, and when it was sent


class LinkOffer:
    """A socket that waits for one connection. The owner calls `accept` or `close`."""

    def __init__(self, epoch: int, attachment_id: int) -> None:
        """Raises OSError if there can be no socket in `SHM_DIR`."""
        self._path = SHM_DIR / f"{NAME_PREFIX}{epoch:016x}-{attachment_id}{LINK_SUFFIX}"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            os.fchmod(self._socket.fileno(), 0o600)  # before it has a name: `bind` keeps the mode
            self._socket.bind(str(self._path))
            self._socket.listen(1)
        except BaseException:
            self.close()
            raise
        self._socket.setblocking(False)

    @property
    def name(self) -> str:
        """What the peer passes to `MessageLink.connect`."""
        return self._path.name

    def accept(self, max_message_bytes: int) -> MessageLink:
        """The link to the peer, which has connected already. Raises `PeerError` if it has not."""
        try:
            connected, _ = self._socket.accept()
        except OSError as error:
            raise PeerError(f"nobody has connected to {self._path}: {error}") from error
        finally:
            self.close()
        return MessageLink(connected, max_message_bytes)

    def close(self) -> None:
        """Removes the socket; nobody can connect any more. May be called again."""
        self._socket.close()
        self._path.unlink(missing_ok=True)


class MessageLink:
    """One end of a connection. `send` and `close` may be called from any thread."""

    def __init__(self, connected: socket.socket, max_message_bytes: int) -> None:
        """Takes the socket."""
        connected.setblocking(True)
        # When the message that was read last was sent: on `time.perf_counter`, one clock for all processes of a host.
        self.sent_s = 0.0
        self._socket = connected
        self._max_message_bytes = max_message_bytes
        self._sending = threading.Lock()
        self._unsent = deque[memoryview]()  # what had no room in the socket; while there is any, a thread sends it
        self._receiver: threading.Thread | None = None
        self._is_read = False  # by a thread, which releases the socket
        self._is_closed = False  # by this end

    @classmethod
    def connect(cls, name: str, max_message_bytes: int) -> Self:
        """Connects to the offer of that name. Raises `PeerError`."""
        path = SHM_DIR / Path(name).name
        try:
            connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                connected.connect(str(path))
            except OSError:
                connected.close()
                raise
        except OSError as error:
            raise PeerError(f"cannot connect to {path}: {error}") from error
        return cls(connected, max_message_bytes)

    def send(self, message: bytes) -> None:
        """Sends a message; never waits for the peer. Raises `PeerError`.

        A thread sends what the peer has no room for yet. More than two of the largest messages never wait for that.
        """
        if len(message) > self._max_message_bytes:
            raise PeerError(f"a message has {len(message)} bytes, the limit is {self._max_message_bytes}")
        try:
            with self._sending:
                self._send(memoryview(_HEADER.pack(len(message), time.perf_counter()) + message))
        except OSError as error:
            self.close()  # a part of the message may have been sent
            raise PeerError(f"no message to the other worker: {error}") from error

    def receive(self, on_message: Callable[[bytes], None], on_error: Callable[[PeerError], None]) -> None:
        """Starts a thread that calls `on_message` for each message, in order, until either side closes the link.

        It calls `on_error`, and ends, for a message that is too large or breaks off.
        """
        arguments = on_message, on_error
        self._is_read = True
        self._receiver = threading.Thread(target=self._receive, args=arguments, name="plan-link", daemon=True)
        self._receiver.start()

    def receive_by(
        self,
        read: Callable[[int, Callable[[], bool]], None],
        on_message: Callable[[bytes], None],
        on_error: Callable[[PeerError], None],
    ) -> None:
        """The same by a thread that waits for other things, too.

        `read` has it call a function whenever a descriptor has something to read, until that returns False.
        """
        self._is_read = True
        read(self._socket.fileno(), partial(self._receive_next, on_message, on_error))

    def close(self) -> None:
        """Ends both directions. Messages that have not been read may be lost. May be called again."""
        self._is_closed = True
        with contextlib.suppress(OSError):  # the peer has closed it
            self._socket.shutdown(socket.SHUT_RDWR)
        if not self._is_read:
            self._release()

    def _send(self, message: memoryview) -> None:
        """By one thread at a time."""
        if self._is_closed:
            raise OSError("the link is closed")
        if self._unsent:
            if (num_unsent := sum(map(len, self._unsent))) > self._max_message_bytes:
                raise OSError(f"it has not read {num_unsent} bytes, the limit is {self._max_message_bytes}")
            self._unsent.append(message)
            return
        num_sent = 0
        with contextlib.suppress(BlockingIOError):
            num_sent = self._socket.send(message, socket.MSG_DONTWAIT)
        if num_sent < len(message):
            own = self._socket.dup()  # the other may be closed while the thread uses this one
            self._unsent.append(message[num_sent:])
            threading.Thread(target=self._send_rest, args=(own,), name="plan-link-rest", daemon=True).start()

    def _send_rest(self, connected: socket.socket) -> None:
        """Sends what has not been sent, until nothing is left or either side closes the link."""
        try:
            with connected:
                is_any_left = True
                while is_any_left:
                    connected.sendall(self._unsent[0])
                    with self._sending:  # what comes when nothing is left is sent without this thread
                        self._unsent.popleft()
                        is_any_left = bool(self._unsent)
        except OSError:
            self.close()

    def _receive(self, on_message: Callable[[bytes], None], on_error: Callable[[PeerError], None]) -> None:
        while self._receive_next(on_message, on_error):
            pass

    def _receive_next(self, on_message: Callable[[bytes], None], on_error: Callable[[PeerError], None]) -> bool:
        """Waits for a message. Returns whether more may come."""
        may_go_on = False
        try:
            if (message := self._read_message()) is not None:
                on_message(message)
                may_go_on = True
        except ConnectionResetError:
            pass  # the other end was closed
        except OSError as error:
            if not self._is_closed:
                limit = self._max_message_bytes
                on_error(PeerError(f"a message of the other worker is unreadable: {error}, limit {limit} bytes"))
        finally:
            if not may_go_on:
                self._release()
        return may_go_on

    def _read_message(self) -> bytes | None:
        """None: an end is closed."""
        header = self._read(_HEADER.size)
        if not header:
            return None
        if len(header) < _HEADER.size:
            raise OSError("its header breaks off")
        num_bytes, self.sent_s = _HEADER.unpack(header)
        if num_bytes > self._max_message_bytes:
            raise OSError(f"it has {num_bytes} bytes")
        message = self._read(num_bytes)
        if len(message) < num_bytes:
            raise OSError(f"it breaks off after {len(message)} of {num_bytes} bytes")
        return message

    def _read(self, num_bytes: int) -> bytes:
        """Waits for so many bytes; fewer: an end is closed."""
        content = self._socket.recv(num_bytes, socket.MSG_WAITALL)
        while 0 < len(content) < num_bytes:  # a signal has ended the wait, or an end is closed
            if not (more := self._socket.recv(num_bytes - len(content), socket.MSG_WAITALL)):
                break
            content += more
        return content

    def _release(self) -> None:
        with contextlib.suppress(OSError):  # the peer has closed it
            self._socket.shutdown(socket.SHUT_RDWR)  # ends the thread that sends, too
        with self._sending:  # otherwise a message might go to another file that gets the number
            self._socket.close()
