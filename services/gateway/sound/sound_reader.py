"""`SoundReader`: decodes sound and computes its features, in a process of its own (`decode.py`)."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import structlog

from services.common.errors import CapacityError, InvalidRequest
from services.common.fairness.client_turns import ClientTurns

log = structlog.get_logger()

START_TIMEOUT_S = 60.0  # it imports torch
TIMEOUT_S = 120.0  # for one file; `decode.MAX_CPU_S` ends most of them before
MAX_WAITING = 64
MAX_WAITING_OF_CLIENT = 16
_MODULE = "services.gateway.sound.decode"
_ROOT = Path(__file__).parents[3]

Client = tuple[int, int]


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
    """Runs in the event loop. One file at a time is decoded, clients take turns. `close` ends the process."""

    def __init__(self, path: Path, max_seconds: int) -> None:
        """path: the model's directory, with preprocessor_config.json"""
        self.max_seconds = max_seconds
        self._options = json.dumps({"path": str(path.resolve()), "max_seconds": max_seconds})
        self._turns = ClientTurns(1)
        self._num_waiting_of = Counter[Client]()
        self._process: subprocess.Popen[bytes] | None = None

    async def read(self, data: bytes, client: Client) -> Sound:
        """The features of a file. Raises `InvalidRequest` for one that cannot be used, `CapacityError` if many wait."""
        for count, most in (
            (self._num_waiting_of[client], MAX_WAITING_OF_CLIENT),
            (self._num_waiting_of.total(), MAX_WAITING),
        ):
            if count >= most:
                raise CapacityError(f"{count} files of sound wait to be decoded, at most {most} may", retry_after_s=1.0)
        self._num_waiting_of[client] += 1
        try:
            async with self._turns.turn(client):
                return await self._read_now(data)
        finally:
            self._num_waiting_of[client] -= 1

    async def close(self) -> None:
        """Ends the process."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            await asyncio.to_thread(_close, process)

    def _start(self) -> subprocess.Popen[bytes]:
        # Not by asyncio: uvloop runs Python in the child between fork and exec, where it crashes now and then.
        return subprocess.Popen(
            [sys.executable, "-m", _MODULE, self._options],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=_ROOT,
        )  # fmt: skip

    async def _read_now(self, data: bytes) -> Sound:
        limit_s = TIMEOUT_S if self._process is not None else START_TIMEOUT_S + TIMEOUT_S
        process = self._process = self._process or self._start()
        try:
            async with asyncio.timeout(limit_s):
                answer, features = await asyncio.to_thread(_exchange, process, data)
        except TimeoutError:
            await self.close()
            raise InvalidRequest(f"the sound has not been decoded within {limit_s:g} s", "file") from None
        except asyncio.CancelledError:
            await asyncio.shield(self.close())  # a thread still waits for its answer
            raise
        if answer is None:
            self._process = None
            status = await asyncio.to_thread(_close, process)
            log.warning("the process that decodes sound has ended", status=status)
            raise InvalidRequest("the sound takes too much time or memory to decode", "file")
        if "error" in answer:
            raise InvalidRequest(answer["error"], "file")
        return Sound(np.frombuffer(features, "<f4").reshape(answer["shape"]), answer["seconds"])


def _exchange(process: subprocess.Popen[bytes], data: bytes) -> tuple[Mapping[str, Any] | None, bytes]:
    """The answer to a file, and its features; None if the process has ended."""
    assert process.stdin is not None and process.stdout is not None, "they are pipes"
    try:
        process.stdin.write(len(data).to_bytes(8, "little") + data)
        process.stdin.flush()
    except BrokenPipeError:
        return None, b""
    line = process.stdout.readline()
    if not line.endswith(b"\n"):
        return None, b""
    answer = json.loads(line)
    num_bytes = 4 * answer["shape"][0] * answer["shape"][1] if "shape" in answer else 0
    features = process.stdout.read(num_bytes)
    return (answer, features) if len(features) == num_bytes else (None, b"")


def _close(process: subprocess.Popen[bytes]) -> int:
    """Closes the pipes of a process that ends; returns its exit status when it has ended."""
    assert process.stdin is not None and process.stdout is not None, "they are pipes"
    with contextlib.suppress(BrokenPipeError):  # a file has been written in part
        process.stdin.close()
    process.stdout.close()
    return process.wait()
