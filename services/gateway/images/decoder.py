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
from collections import OrderedDict
from functools import partial
from typing import NamedTuple
from weakref import WeakSet

import structlog

from services.common.errors import InvalidRequest, TwostrokeError
from services.common.fairness import Client, ClientTurns
from services.common.memory_file import MemoryFile
from services.common.vision.layout import Layout, PictureShape
from services.common.vision.layouts import describe
from services.gateway.images.decode import MAX_CPU_S
from services.gateway.images.picture import Picture, Pixels
from services.gateway.images.sources import PictureFile
from services.gateway.resources.memory_budget import HeldMemory
from services.gateway.resources.piped_processes import PipedProcesses, end_of, read_rest, write_and_read

log = structlog.get_logger()

MOST_PROCESSES = 8
TIMEOUT_S = 30.0  # far above the limit of CPU time, for a busy machine; with it a process starts
MAX_AT_ONCE = 4  # pictures of one request that are decoded beside each other, or wait for it
MAX_WAIT_S = 60.0 * MAX_AT_ONCE  # for a turn, behind so many pictures of each other request
MAX_HEAD_BYTES = 2**16
MAX_FILES = 128  # of pixels, with those that are kept; further pictures are sent through pipes and by gRPC
_MODULE = "services.gateway.images.decode"


class Encoding(NamedTuple):
    """A file, and how a client wants it read."""

    file: PictureFile
    is_low: bool  # little detail is enough
    worker_resizes: bool = False  # as far as `resized_by_worker` allows


class Decoder:
    """Used in the event loop. `close` ends the processes."""

    def __init__(self, layout: Layout, max_pixels: int, max_kept_bytes: int = 0) -> None:
        """max_pixels: of a picture, before it is made smaller. max_kept_bytes: of results, for files that come again"""
        self._kept: OrderedDict[bytes, Picture] = OrderedDict()  # by the file's hash, least recently used first
        self._num_kept_bytes, self._max_kept_bytes = 0, max_kept_bytes
        num_processes = max(2, min(MOST_PROCESSES, (os.cpu_count() or 1) // 2))
        self._max_pixels = max_pixels
        self._files = WeakSet[MemoryFile]()
        self._turns = ClientTurns(num_processes, MAX_WAIT_S, "a picture")
        self._processes = PipedProcesses(
            _MODULE, json.dumps(describe(layout)), task="decodes pictures", count=num_processes
        )

    async def decode(self, encoded: Encoding, client: Client, held: HeldMemory, waiting: asyncio.Lock) -> Picture:
        """The pixels for the tower, whose memory `held` counts. `waiting`: of the pictures of a request, which wait for
        memory one after another.

        Raises `InvalidRequest` for what is no picture, or too large, and `CapacityError` if it takes too long here, or
        if there is no memory for too long.
        """
        key = _hash_of(encoded)
        if (kept := self._kept.get(key)) is not None:
            self._kept.move_to_end(key)
            await _reserve(held, len(kept.pixels), waiting)
            return kept
        async with self._turns.turn(client):
            picture = await self._decode(encoded, key)
            num_bytes = len(picture.pixels)
            # Within the turn: no more pictures than there are processes are ever in memory without being counted.
            is_held = held.try_reserve(num_bytes, "pictures") is None
        if not is_held:  # it comes again when there is room
            del picture
            await _reserve(held, num_bytes, waiting)
            async with self._turns.turn(client):
                picture = await self._decode(encoded, key)
        self._keep(key, picture)
        return picture

    async def _decode(self, encoded: Encoding, file_hash: bytes) -> Picture:
        exchange = partial(_exchange, encoded=encoded, max_pixels=self._max_pixels, file=self._new_file())
        shape, pixels = await self._processes.run(exchange, TIMEOUT_S, "a picture has not been decoded")
        return Picture.of(shape, pixels, file_hash)

    def _new_file(self) -> MemoryFile | None:
        """For pixels; None if there are too many: then they come through a pipe."""
        while self._kept and len(self._files) >= MAX_FILES:
            self._drop_oldest()
        if len(self._files) >= MAX_FILES:
            return None
        try:
            file = MemoryFile()
        except OSError as error:
            log.warning("no memory file for pixels, which come through a pipe", reason=str(error))
            return None
        self._files.add(file)
        return file

    def _keep(self, key: bytes, picture: Picture) -> None:
        if key in self._kept:  # it has come twice at the same time
            return
        self._kept[key] = picture
        self._num_kept_bytes += len(picture.pixels)
        while self._num_kept_bytes > self._max_kept_bytes:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        self._num_kept_bytes -= len(self._kept.popitem(last=False)[1].pixels)

    async def close(self) -> None:
        """Ends the processes."""
        await self._processes.close()


def _exchange(
    process: subprocess.Popen[bytes], encoded: Encoding, max_pixels: int, file: MemoryFile | None
) -> tuple[PictureShape, Pixels]:
    """Writes a picture and reads what became of it. On a thread, until the process answers or ends."""
    asked = {
        "num_bytes": len(encoded.file.data),
        "max_pixels": max_pixels,
        "is_low": encoded.is_low,
        "worker_resizes": encoded.worker_resizes,
        "path": "" if file is None else file.path,
    }
    line = write_and_read(process, MAX_HEAD_BYTES, json.dumps(asked).encode() + b"\n", encoded.file.data)
    if not line.endswith(b"\n"):
        raise _why_ended(process)
    answer = json.loads(line)
    if "error" in answer:
        raise InvalidRequest(answer["error"], "messages")
    shape = PictureShape(**answer["shape"])
    if file is not None and answer["is_in_file"]:
        file.seal()
        assert len(file) == shape.num_bytes, "the process has written all of it"
        return shape, file
    pixels = read_rest(process, shape.num_bytes)
    if len(pixels) < shape.num_bytes:
        raise _why_ended(process)
    return shape, pixels


def _why_ended(process: subprocess.Popen[bytes]) -> Exception:
    status = end_of(process, "decodes pictures")
    if status >= 0:
        return TwostrokeError("pictures cannot be decoded: see the gateway's log")
    if status == -signal.SIGPROF:
        return InvalidRequest(f"a picture takes more than {MAX_CPU_S:g} s of CPU time to decode", "messages")
    return InvalidRequest("a picture cannot be decoded: it ended the process that reads it", "messages")


async def _reserve(held: HeldMemory, num_bytes: int, waiting: asyncio.Lock) -> None:
    async with waiting:
        await held.reserve(num_bytes, "pictures", "messages", "send fewer or smaller ones")


def _hash_of(encoded: Encoding) -> bytes:
    return hashlib.sha256((b"low" if encoded.is_low else b"any") + encoded.file.hash).digest()
