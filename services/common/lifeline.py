"""`Lifeline`: a worker's socket to the launcher, which holds memory for the worker that comes after it.

The launcher makes a pair of sockets for each worker. It learns from the end of this one, at once, that the worker has
died. Through it a worker sends the descriptor of its weights' memory, and another one asks for it later.
"""

from __future__ import annotations

import fcntl
import json
import os
import resource
import socket
from collections.abc import Sequence
from typing import NamedTuple

from services.common.errors import PeerError

MAX_PACKET_BYTES = 1 << 16
ANSWER_TIMEOUT_S = 10.0


# Linux closes the files of a dead process from the highest number down. The lifeline must end before the connections to
# the GPU do, which takes tens of milliseconds.
HIGH_DESCRIPTOR = 1000


def move_up(descriptor: int) -> int:
    """Gives a worker's end of its lifeline a high number, and keeps it from processes that the worker starts."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0] - 1
    high = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, min(HIGH_DESCRIPTOR, most))
    os.close(descriptor)
    return high


class HeldMemory(NamedTuple):
    """Memory that exists as long as a process has this descriptor open, or maps it."""

    descriptor: int  # of this process; whoever has the tuple closes it
    num_bytes: int
    checksum: int  # of the content


class Lifeline:
    """For one thread at a time."""

    def __init__(self, descriptor: int) -> None:
        """`descriptor`: of the socket that this process has inherited."""
        self._socket = socket.socket(fileno=descriptor)
        self._socket.settimeout(ANSWER_TIMEOUT_S)

    def hold(self, key: str, memory: HeldMemory) -> None:
        """Lets the launcher hold the memory, until `keep` leaves it out. The caller keeps its descriptor.

        Raises `PeerError` if the launcher does not take it.
        """
        packet = {"hold": key, "num_bytes": memory.num_bytes, "checksum": memory.checksum}
        try:
            socket.send_fds(self._socket, [json.dumps(packet).encode()], [memory.descriptor])
        except OSError as error:
            raise PeerError(f"the launcher does not take the weights' memory: {error}") from error

    def keep(self, keys: Sequence[str], prefix: str = "") -> None:
        """Lets the launcher give up all memory that it holds under other keys that begin with `prefix`.

        Raises `PeerError` if it is gone.
        """
        try:
            self._socket.send(json.dumps({"keep": keys, "prefix": prefix}).encode())
        except OSError as error:
            raise PeerError(f"the launcher does not take what memory to keep: {error}") from error

    def ask(self, key: str) -> HeldMemory | None:
        """The memory that is held under this key; None if there is none. Raises `PeerError` without an answer."""
        try:
            self._socket.send(json.dumps({"ask": key}).encode())
            packet, descriptors, _, _ = socket.recv_fds(self._socket, MAX_PACKET_BYTES, 1)
        except OSError as error:
            raise PeerError(f"the launcher does not answer within {ANSWER_TIMEOUT_S:g} s: {error}") from error
        if not descriptors:
            return None
        answer = json.loads(packet)
        return HeldMemory(descriptors[0], answer["num_bytes"], answer["checksum"])
