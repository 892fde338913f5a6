"""`GpuFaults`: ends all processes of a GPU for which the MPS server has failed, so that new ones can use it.

An error that one process causes on a GPU fails all MPS clients of this GPU, and none of others. The server accepts no
new ones there until all of these have ended, also one that waits as a standby and does not notice.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable, Sequence, Set

import structlog

from services.common.errors import PeerError
from services.launch.child import SECTIONS, Child
from services.launch.mps import MpsDaemon, gpu_of

log = structlog.get_logger()

INTERVAL_S = 5.0  # where another launcher has the other worker, whose end is not seen here
# Each after the one before, the first after the end of a worker: the server may need a while to notice. The last one
# also ends processes of other GPUs, if it is still failed.
CHECKS_AFTER_S = (0.0, 0.3, 0.7)


class GpuFaults:
    """Looks at the server when a worker has ended, and every `interval_s` seconds if others have clients there, too."""

    def __init__(
        self, daemon: MpsDaemon, processes: Sequence[Iterable[Child]], interval_s: float | None = None
    ) -> None:
        """`processes`: the services and the standbys at any time."""
        self._daemon = daemon
        self._processes = processes
        self._interval_s = interval_s
        self._has_ended = asyncio.Event()
        self._devices: set[str] = set()  # of workers that have ended since the checks began

    def note_end(self, child: Child) -> None:
        """A service has ended."""
        if child.role in SECTIONS:
            self._devices.add(gpu_of(child.device))
        self._has_ended.set()

    async def run(self) -> None:
        """Checks until cancelled."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._interval_s):
                    await self._has_ended.wait()
            self._has_ended.clear()
            devices, self._devices = self._devices, set()
            for delay_s in CHECKS_AFTER_S[:-1]:
                await asyncio.sleep(delay_s)
                await self._check(devices | self._devices)
            await asyncio.sleep(CHECKS_AFTER_S[-1])
            await self._check(None)

    async def _check(self, devices: Set[str] | None) -> None:
        """Ends the workers of these GPUs, if the server has failed; None: those of all."""
        try:
            if not await asyncio.to_thread(self._daemon.has_fault):
                return
        except PeerError as error:
            log.error("cannot ask the MPS daemon for faults", reason=str(error))
            return
        clients = [
            child
            for each in self._processes
            for child in each
            if child.role in SECTIONS and child.is_running and (devices is None or gpu_of(child.device) in devices)
        ]
        if not clients:
            return
        pids = ",".join(str(child.pid) for child in clients)
        log.error("the GPU has failed for all its processes, which are started again", pids=pids)
        for child in clients:
            child.kill("the MPS server has failed, and accepts new clients once all have ended")
