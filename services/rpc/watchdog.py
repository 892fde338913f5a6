"""`Watchdog`: notices that a service makes no progress, although its port is open and its health check answers.

It reads a counter of progress at regular intervals. A service with work whose counter does not change for the time
limit is stalled: an error in the log names role, step, layer and requests, the status call returns the same as
`stall`, and the health turns NOT_SERVING. The watchdog runs on the event loop. Only the supervisor or a container's
probe can notice that the event loop itself has stopped.
"""

from __future__ import annotations

import asyncio
import faulthandler
import os
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import structlog

from services.pb import stall_pb2

log = structlog.get_logger()

MAX_REQUEST_IDS = 16  # that a report names
CHECKS_PER_BOUND = 8


@dataclass(frozen=True, slots=True)
class Progress:
    """How far the running work has come."""

    counter: tuple[int, ...]  # numbers that change with every bit of progress
    step_id: int = 0
    layer: int | None = None  # None: the host cannot know it
    request_ids: tuple[str, ...] = ()
    waits_for: str = ""  # role of the service it waits for; empty when it computes


OnStall = Callable[[stall_pb2.Stall | None], Awaitable[None]]


class Watchdog:
    """`read_progress` returns None when there is nothing to do; `on_stall` is awaited when a stall begins or ends.

    Time in which the watchdog itself did not run does not count: the process was stopped, or had no CPU.
    """

    def __init__(
        self, role: str, read_progress: Callable[[], Progress | None], on_stall: OnStall, stall_timeout_s: float
    ) -> None:
        self._role = role
        self._read_progress = read_progress
        self._on_stall = on_stall
        self._stall_timeout_s = stall_timeout_s
        self._interval_s = stall_timeout_s / CHECKS_PER_BOUND
        self._counter: tuple[int, ...] | None = None
        self._last_check_s: float | None = None
        self._stalled_s = 0.0  # since the last progress
        self.stall: stall_pb2.Stall | None = None

    async def run(self) -> None:
        """Watches until cancelled."""
        while True:
            await asyncio.sleep(self._interval_s)
            await self.check(time.monotonic())

    async def check(self, now: float) -> None:
        """Checks for progress once; `now` is on the monotonic clock."""
        passed_s = 0.0 if self._last_check_s is None else min(now - self._last_check_s, 2 * self._interval_s)
        self._last_check_s = now
        progress = self._read_progress()
        counter = None if progress is None else progress.counter
        if counter is None or counter != self._counter:
            self._counter, self._stalled_s = counter, 0.0
            if self.stall is not None:
                log.warning("progress again", role=self._role)
                await self._report(None)
            return
        self._stalled_s += passed_s
        if self._stalled_s >= self._stall_timeout_s:
            await self._report(self._describe(progress))

    def _describe(self, progress: Progress) -> stall_pb2.Stall:
        return stall_pb2.Stall(
            role=self._role,
            step_id=progress.step_id,
            layer=progress.layer,
            request_ids=progress.request_ids[:MAX_REQUEST_IDS],
            waits_for=progress.waits_for,
            stalled_s=self._stalled_s,
        )

    async def _report(self, stall: stall_pb2.Stall | None) -> None:
        last, self.stall = self.stall, stall
        if stall is None or last is None or last.waits_for != stall.waits_for:
            if stall is not None:
                if last is None:
                    log.error("stacks of all threads", role=stall.role, stack=stacks_of_threads())
                # The last of both: the launcher tells the last error if the process is killed now.
                log.error("stalled", error=describe_stall(stall), role=stall.role, waits_for=stall.waits_for)
            await self._on_stall(stall)


def stacks_of_threads() -> str:
    """The stacks of this process's threads, the innermost call of each first; if there are none to be had, why."""
    try:
        with os.fdopen(os.memfd_create("stacks"), "rb") as file:  # perhaps no directory can be written to
            faulthandler.dump_traceback(file)
            file.seek(0)
            return file.read().decode(errors="backslashreplace")
    except OSError as error:
        return str(error)


def describe_stall(stall: stall_pb2.Stall) -> str:
    """A stall as one line of text."""
    words = [f"{stall.role} has made no progress for {stall.stalled_s:.1f} s"]
    if stall.step_id:
        words.append(f"step {stall.step_id}")
    if stall.HasField("layer"):
        words.append(f"layer {stall.layer}")
    if stall.request_ids:
        words.append(f"requests {', '.join(stall.request_ids)}")
    if stall.waits_for:
        words.append(f"waits for {stall.waits_for}")
    return ", ".join(words)
