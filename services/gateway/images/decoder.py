"""`Decoder`: decodes pictures in a few processes of their own, which clients use in turns.

Event loop and threads never meet a picture that explodes: a process has limits of time and memory, and another one is
started after a picture has ended it. The first one starts with the first picture.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import signal
import subprocess
import sys
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import structlog

from services.common.errors import CapacityError, InvalidRequest, TwostrokeError
from services.common.fairness.client_turns import Client, ClientTurns
from services.common.vision.layout import Layout, PictureShape
from services.common.vision.layouts import describe
from services.gateway.images.decode import MAX_CPU_S, shape_from
from services.gateway.images.picture import Picture
from services.gateway.resources.memory_budget import HeldMemory

log = structlog.get_logger()

MOST_PROCESSES = 8
TIMEOUT_S = 30.0  # far above the limit of CPU time, for a busy machine; with it a process starts
MAX_WAIT_S = 60.0  # for a turn
MAX_HEAD_BYTES = 2**16
# Signals from outside, at any moment. A picture ends the process by others.
_KILLED_BY = (-signal.SIGKILL, -signal.SIGTERM, -signal.SIGHUP)
_MAX_KILLS = 2  # of the process, for one picture
_MODULE, _ROOT = "services.gateway.images.decode", Path(__file__).parents[3]


class Encoding(NamedTuple):
    """A picture as a client sends it, and how it wants it read."""

    data: bytes
    is_low: bool  # little detail is enough


class _KilledError(Exception):
    """The process was killed from outside, and no picture is to blame."""


class Decoder:
    """Used in the event loop. `close` ends the processes."""

    def __init__(self, layout: Layout, max_pixels: int, max_kept_bytes: int = 0) -> None:
        """max_pixels: of a picture, before it is made smaller. max_kept_bytes: of results, for files that come again"""
        self._kept: OrderedDict[bytes, Picture] = OrderedDict()  # by the file's hash, least recently used first
        self._num_kept_bytes, self._max_kept_bytes = 0, max_kept_bytes
        num_processes = max(2, min(MOST_PROCESSES, (os.cpu_count() or 1) // 2))
        self._layout = describe(layout)
        self._max_pixels = max_pixels
        self._turns = ClientTurns(num_processes, MAX_WAIT_S, "a picture")
        self._idle: list[subprocess.Popen[bytes]] = []
        self._busy: set[subprocess.Popen[bytes]] = set()
        self._threads = ThreadPoolExecutor(num_processes, thread_name_prefix="pictures")

    async def decode(self, encoded: Encoding, client: Client, held: HeldMemory) -> Picture:
        """The pixels for the tower, whose memory `held` counts.

        Raises `InvalidRequest` for what is no picture, or too large, and `CapacityError` if it takes too long here, or
        if there is no memory for too long.
        """
        key = await asyncio.to_thread(_hash_of, encoded)
        if (kept := self._kept.get(key)) is not None:
            self._kept.move_to_end(key)
            await _reserve(held, len(kept.tiles))
            return kept
        async with self._turns.turn(client):
            picture = await self._decode(encoded, key)
            num_bytes = len(picture.tiles)
            # Within the turn: no more pictures than there are processes are ever in memory without being counted.
            is_held = held.try_reserve(num_bytes, "pictures") is None
        if not is_held:  # it comes again when there is room
            del picture
            await _reserve(held, num_bytes)
            async with self._turns.turn(client):
                picture = await self._decode(encoded, key)
        self._keep(key, picture)
        return picture

    async def _decode(self, encoded: Encoding, file_hash: bytes) -> Picture:
        for _ in range(_MAX_KILLS):
            process = self._take()
            self._busy.add(process)
            try:
                async with asyncio.timeout(TIMEOUT_S):
                    loop = asyncio.get_running_loop()
                    shape, tiles = await loop.run_in_executor(self._threads, self._exchange, process, encoded)
                self._idle.append(process)
                return Picture.of(shape, tiles, file_hash)
            except TimeoutError:
                raise CapacityError(f"a picture has not been decoded within {TIMEOUT_S:g} s") from None
            except InvalidRequest:
                if process.poll() is None:
                    self._idle.append(process)
                raise
            except _KilledError:
                continue
            finally:
                self._busy.discard(process)
                if process not in self._idle:
                    process.kill()  # its thread then ends
        raise CapacityError(f"the process that decodes pictures was killed {_MAX_KILLS} times")

    def _take(self) -> subprocess.Popen[bytes]:
        """An idle process, or a new one. What has ended while it was idle is dropped."""
        while self._idle:
            process = self._idle.pop()
            if process.poll() is None:
                return process
            log.warning("an idle process that decodes pictures has ended", status=_end(process))
        return self._start()

    def _keep(self, key: bytes, picture: Picture) -> None:
        if key in self._kept:  # it has come twice at the same time
            return
        self._kept[key] = picture
        self._num_kept_bytes += len(picture.tiles)
        while self._num_kept_bytes > self._max_kept_bytes:
            self._num_kept_bytes -= len(self._kept.popitem(last=False)[1].tiles)

    async def close(self) -> None:
        """Ends the processes."""
        for process in (*self._idle, *self._busy):
            process.kill()
        await asyncio.to_thread(self._threads.shutdown)
        for process in self._idle:
            await asyncio.to_thread(_end, process)
        self._idle.clear()

    def _exchange(self, process: subprocess.Popen[bytes], encoded: Encoding) -> tuple[PictureShape, bytes]:
        """Writes a picture and reads what became of it. On a thread, until the process answers or ends."""
        assert process.stdin is not None and process.stdout is not None, "they are pipes"
        asked = {"num_bytes": len(encoded.data), "max_pixels": self._max_pixels, "is_low": encoded.is_low}
        try:
            process.stdin.write(json.dumps(asked).encode() + b"\n")
            process.stdin.write(encoded.data)
            process.stdin.flush()
        except BrokenPipeError:
            raise self._why_ended(process) from None
        line = process.stdout.readline(MAX_HEAD_BYTES)
        if not line.endswith(b"\n"):
            raise self._why_ended(process)
        answer = json.loads(line)
        if "error" in answer:
            raise InvalidRequest(answer["error"], "messages")
        shape = shape_from(answer["shape"])
        tiles = process.stdout.read(shape.num_bytes)
        if len(tiles) < shape.num_bytes:
            raise self._why_ended(process)
        return shape, tiles

    def _why_ended(self, process: subprocess.Popen[bytes]) -> Exception:
        status = _end(process)
        log.warning("the process that decodes pictures has ended", status=status)
        if status in _KILLED_BY:
            return _KilledError()
        if status >= 0:
            return TwostrokeError("pictures cannot be decoded: see the gateway's log")
        if status == -signal.SIGPROF:
            return InvalidRequest(f"a picture takes more than {MAX_CPU_S:g} s of CPU time to decode", "messages")
        return InvalidRequest("a picture cannot be decoded: it ended the process that reads it", "messages")

    def _start(self) -> subprocess.Popen[bytes]:
        # Not by asyncio: uvloop runs Python in the child between fork and exec, where it crashes now and then.
        command = [sys.executable, "-m", _MODULE, json.dumps(self._layout)]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=_ROOT)


async def _reserve(held: HeldMemory, num_bytes: int) -> None:
    await held.reserve(num_bytes, "pictures", "messages", "send fewer or smaller ones")


def _hash_of(encoded: Encoding) -> bytes:
    digest = hashlib.sha256(b"low" if encoded.is_low else b"any")
    digest.update(encoded.data)
    return digest.digest()


def _end(process: subprocess.Popen[bytes]) -> int:
    """Closes the pipes of a process that ends; returns its exit status."""
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            try:
                pipe.close()
            except BrokenPipeError:  # a picture has been written in part
                continue
    return process.wait()
