"""`StartDeadline`: until when services may start, or a gateway waits for its first dense worker. Each new progress of a
dense worker that loads extends it.

Reading the weights of a large model, or building TensorRT plans, takes minutes. The dense worker reports each percent
and each plan, and these are few, so that a start that makes progress ends in finite time, and one that makes none ends
after the time given. So does one of a worker that loads, dies and loads again: the same progress extends a deadline
`MAX_REPEATS` times.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Callable

import grpc

from services.common.config import PeerSection
from services.common.errors import ConfigError, PeerError
from services.pb import dense_pb2, dense_pb2_grpc
from services.rpc.client import open_channel, read_peer_tls

POLL_S = 0.5
LOADED_POLL_S = 0.05
CALL_TIMEOUT_S = 1.0
MAX_REPEATS = 3


class StartDeadline:
    """`timeout_s` seconds from now on, and from each progress on."""

    def __init__(self, timeout_s: float, now: Callable[[], float] = time.monotonic) -> None:
        self._timeout_s, self._now = timeout_s, now
        self._ends_at = now() + timeout_s
        self._progress = ""
        self._noted = Counter[str]()  # how often each line has extended it

    def note(self, status: dense_pb2.DenseStatus) -> None:
        """Extends the deadline if the dense worker has reported other progress than before."""
        self.note_progress(status.loading)

    def note_progress(self, line: str) -> None:
        """Extends the deadline by a line that differs from the last one, and is not empty."""
        if not line or line == self._progress:
            return
        self._progress = line
        if self._noted[line] < MAX_REPEATS:
            self._noted[line] += 1
            self._ends_at = self._now() + self._timeout_s

    @property
    def remaining_s(self) -> float:
        """Seconds until the deadline; 0 or less if it has passed."""
        return self._ends_at - self._now()

    def check(self, what: str) -> None:
        """Raises `PeerError` with `what` if the deadline has passed."""
        if self.remaining_s > 0:
            return
        if not self._progress:
            raise PeerError(f"{what} within {self._timeout_s:g} s")
        raise PeerError(
            f"{what} within {self._timeout_s:g} s (launch.start_timeout_s) after the dense worker's last progress: "
            f"{self._progress}"
        )

    async def wait_loaded(self, stub: dense_pb2_grpc.DenseWorkerStub, name: str) -> dense_pb2.DenseStatus:
        """Waits until a dense worker has its weights; returns its status. Raises `PeerError` after the deadline."""
        while True:
            with contextlib.suppress(grpc.aio.AioRpcError):  # it may not listen yet
                status = await stub.GetStatus(dense_pb2.GetStatusRequest(), timeout=CALL_TIMEOUT_S)
                if status.state != dense_pb2.DenseStatus.LOADING:
                    return status
                self.note(status)
            self.check(f"{name} has not loaded its weights")
            await asyncio.sleep(LOADED_POLL_S)

    async def watch(self, address: str, peers: PeerSection) -> None:
        """Asks the dense worker at `address` for its progress until cancelled."""
        while True:
            # It may not listen yet; its TLS files are checked elsewhere.
            with contextlib.suppress(grpc.aio.AioRpcError, ConfigError):
                async with open_channel(address, peers.max_message_bytes, read_peer_tls(peers)) as channel:
                    stub = dense_pb2_grpc.DenseWorkerStub(channel)
                    while True:
                        self.note(await stub.GetStatus(dense_pb2.GetStatusRequest(), timeout=CALL_TIMEOUT_S))
                        await asyncio.sleep(POLL_S)
            await asyncio.sleep(POLL_S)
