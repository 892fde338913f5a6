"""`Lifelines`: what the launcher does for workers that die, at once and whatever its event loop does meanwhile.

- It sets the abort mark of every channel of a dead worker. Work that the worker has left on a GPU may wait for the
  peer, which may be dead, too. Under MPS a dead process's kernel has about 10 ms to end; then every process of that GPU
  fails (measured on an H200: kernels of 5 ms ended well, those of 20 ms never).
- It holds the memory of the dense worker's weights, and of what drafts for it, so that it is still there for the next
  one.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import selectors
import socket
import threading
from collections.abc import Set
from typing import TypeAlias

import structlog

from services.channel.region import abort_regions_of
from services.common.lifeline import MAX_PACKET_BYTES, HeldMemory

log = structlog.get_logger()

Line: TypeAlias = tuple[socket.socket, int]  # of a worker, with its process id


class Lifelines:
    """A thread that reads the sockets of all workers, from `start` to `close`."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._added: queue.SimpleQueue[Line | None] = queue.SimpleQueue()  # None: the end
        self._wake, self._waked = socket.socketpair()
        self._thread = threading.Thread(target=self._run, name="lifelines", daemon=True)
        self._held: dict[str, HeldMemory] = {}  # by key

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def close(self) -> None:
        """Ends the thread and gives up the memory."""
        self._add(None)
        self._thread.join()
        self._give_up({*self._held})
        for each in (self._wake, self._waked, *(key.fileobj for key in self._selector.get_map().values())):
            assert isinstance(each, socket.socket)
            each.close()
        self._selector.close()

    def watch(self, line: socket.socket, pid: int) -> None:
        """Watches the worker `pid`, which has the other end of `line`. Takes the socket over."""
        self._add((line, pid))

    def _add(self, line: Line | None) -> None:
        self._added.put(line)
        self._wake.send(b"w")

    def _run(self) -> None:
        self._selector.register(self._waked, selectors.EVENT_READ)
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._waked:
                    self._waked.recv(1)
                    line = self._added.get()
                    if line is None:
                        return
                    self._selector.register(line[0], selectors.EVENT_READ, line[1])
                else:
                    assert isinstance(key.fileobj, socket.socket)
                    self._read(key.fileobj, key.data)

    def _read(self, line: socket.socket, pid: int) -> None:
        packet, descriptors = b"", []
        with contextlib.suppress(ConnectionError):
            packet, descriptors, _, _ = socket.recv_fds(line, MAX_PACKET_BYTES, 1)
        if not packet:
            abort_regions_of(pid)
            log.debug("a service has ended", pid=pid)
            self._selector.unregister(line)
            line.close()
            return
        request = json.loads(packet)
        if "hold" in request:
            if not descriptors:  # this process has no room for another one
                log.error("the weights' memory cannot be held: the launcher may open no more files", pid=pid)
                return
            key = request["hold"]
            self._give_up(self._held.keys() & {key})
            self._held[key] = HeldMemory(descriptors[0], request["num_bytes"], request["checksum"])
            return
        if "keep" in request:
            own = {key for key in self._held if key.startswith(request["prefix"])}
            self._give_up(own - {*request["keep"]})
            return
        with contextlib.suppress(ConnectionError):  # it has died
            self._answer(line, request["ask"])

    def _answer(self, line: socket.socket, key: str) -> None:
        memory = self._held.get(key)
        if memory is None:
            line.send(json.dumps({}).encode())
            return
        answer = json.dumps({"num_bytes": memory.num_bytes, "checksum": memory.checksum})
        socket.send_fds(line, [answer.encode()], [memory.descriptor])

    def _give_up(self, keys: Set[str]) -> None:
        for key in keys:
            os.close(self._held.pop(key).descriptor)
