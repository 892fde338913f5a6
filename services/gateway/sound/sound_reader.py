"""`SoundReader`: decodes sound and computes its features, in a few processes of their own (`decode.py`).

Each file is first decoded as a short one. A long one is given up then, early, and comes again. Long ones may have all
processes but one, so that short ones wait for each other alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from services.common.errors import InvalidRequest, TwostrokeError
from services.common.fairness import Client, ClientTurns
from services.gateway.resources.memory_budget import HeldMemory
from services.gateway.resources.piped_processes import PipedProcesses, end_of, read_rest, write_and_read

MOST_PROCESSES = 4  # each takes 250 MB
TIMEOUT_S = 120.0  # far above the limits of CPU time (`decode.py`), for a busy machine; with it a process starts
MAX_WAIT_S = 600.0  # for a turn; memory bounds how many files wait
MAX_HEAD_BYTES = 2**16  # of the line before the features
_MODULE = "services.gateway.sound.decode"
_FEATURES = "features of sound", "file", "send a shorter one"


@dataclass(frozen=True, slots=True)
class Sound:
    """Log-mel features of a whole file, padded to at least one window of the encoder."""

    features: np.ndarray  # float32 [num_mel_bins, num_frames]
    seconds: float  # of the sound itself

    def window(self, first_frame: int, num_frames: int) -> bytes:
        """The features of some frames as an encoder reads them; zeros behind the end."""
        part = self.features[:, first_frame : first_frame + num_frames]
        return np.pad(part, ((0, 0), (0, num_frames - part.shape[1]))).astype("<f4").tobytes()


class SoundReader:
    """Runs in the event loop. Clients take turns at a few processes, which `close` ends."""

    def __init__(self, path: Path, max_seconds: int) -> None:
        """path: the model's directory, with what says how sound becomes features"""
        options = json.dumps({"path": str(path.resolve()), "max_seconds": max_seconds})
        num_processes = max(2, min(MOST_PROCESSES, (os.cpu_count() or 1) // 2))
        self._turns = ClientTurns(num_processes, MAX_WAIT_S, "the file")
        self._long_turns = ClientTurns(num_processes - 1, MAX_WAIT_S, "the file")
        self._work = set[asyncio.Task[Sound | int | None]]()  # one for each file that is being decoded
        env = os.environ | {"OMP_NUM_THREADS": "1"}
        self._processes = PipedProcesses(
            _MODULE, options, task="decodes sound", count=num_processes, env=env, has_spare=True
        )

    async def read(self, data: bytes, client: Client, held: HeldMemory) -> Sound:
        """The features of a file, whose memory `held` counts in place of the file's own.

        Raises `InvalidRequest` for one that cannot be used, `CapacityError` if it takes too long here, or if there is
        no memory for too long.
        """
        num_bytes_of_file = held.num_bytes
        found = await self._read(data, client, held)
        if isinstance(found, int):  # it comes again when there is room
            await held.reserve(found, *_FEATURES)
            found = await self._read(data, client, None)
            assert isinstance(found, Sound), "its memory is counted already"
        held.give_back(num_bytes_of_file)
        held.settle()
        return found

    async def _read(self, data: bytes, client: Client, held: HeldMemory | None) -> Sound | int:
        """The features, which `held` counts; or how many bytes they have, for which it has no room."""
        found = await self._read_as(data, client, held, is_long=False)
        if found is None:
            found = await self._read_as(data, client, held, is_long=True)
            assert found is not None, "it may be long"
        return found

    async def _read_as(
        self, data: bytes, client: Client, held: HeldMemory | None, *, is_long: bool
    ) -> Sound | int | None:
        """As `_read`. None: the file is long, and `is_long` is false."""
        async with contextlib.AsyncExitStack() as place:
            if is_long:
                await place.enter_async_context(self._long_turns.turn(client))
            await place.enter_async_context(self._turns.turn(client))
            work = asyncio.create_task(self._read_and_leave(data, place.pop_all(), held, is_long=is_long))
        self._work.add(work)
        work.add_done_callback(self._work_done)
        try:
            return await asyncio.shield(work)  # if the client leaves, its file keeps its place until there is an answer
        except asyncio.CancelledError:
            if held is not None:
                work.add_done_callback(lambda _: held.release())  # what it counts for nobody
            raise

    async def close(self) -> None:
        """Ends the processes."""
        for work in self._work:
            work.cancel()
        await asyncio.gather(*self._work, return_exceptions=True)
        await self._processes.close()

    def _work_done(self, work: asyncio.Task[Sound | int | None]) -> None:
        self._work.discard(work)
        if not work.cancelled():
            work.exception()  # whoever waits for it gets it too; nobody may, if the client has left

    async def _read_and_leave(
        self, data: bytes, place: contextlib.AsyncExitStack, held: HeldMemory | None, *, is_long: bool
    ) -> Sound | int | None:
        """With its turn, so that no more files than there are processes are ever in memory without being counted."""
        async with place:
            exchange = partial(_exchange, data=data, is_long=is_long)
            sound = await self._processes.run(exchange, TIMEOUT_S, "the sound has not been decoded")
            if sound is None:
                return None
            num_bytes = sound.features.nbytes
            return sound if held is None or held.try_reserve(num_bytes, _FEATURES[0]) is None else num_bytes


def _exchange(process: subprocess.Popen[bytes], data: bytes, is_long: bool) -> Sound | None:
    """Writes a file and reads what became of it. On a thread, until the process answers or ends.

    None: the file is long, and `is_long` is false.
    """
    line = write_and_read(process, MAX_HEAD_BYTES, len(data).to_bytes(8, "little") + bytes([is_long]), data)
    if not line.endswith(b"\n"):
        raise _why_ended(process)
    answer = json.loads(line)
    if "error" in answer:
        raise InvalidRequest(answer["error"], "file")
    if "is_long" in answer:
        return None
    num_rows, num_frames = answer["shape"]
    features = read_rest(process, 4 * num_rows * num_frames)
    if len(features) < 4 * num_rows * num_frames:
        raise _why_ended(process)
    return Sound(np.frombuffer(features, "<f4").reshape(num_rows, num_frames), answer["seconds"])


def _why_ended(process: subprocess.Popen[bytes]) -> Exception:
    status = end_of(process, "decodes sound")
    if status >= 0:
        return TwostrokeError("sound cannot be decoded: see the gateway's log")
    if status == -signal.SIGPROF:
        return InvalidRequest("the sound takes more CPU time to decode than sound of its length may", "file")
    return InvalidRequest("the sound cannot be decoded: it ended the process that reads it", "file")
