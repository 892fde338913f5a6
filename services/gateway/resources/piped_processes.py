"""`PipedProcesses`: a few processes that keep what clients send from the gateway, each for one client at a time.

They read standard input, and answer at standard output. Their own limits of time and memory end them by signals,
whatever it is that they were given.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import structlog

from services.common.errors import CapacityError, InvalidRequest

log = structlog.get_logger()

MAX_KILLS = 2  # of the process, for one exchange
# Signals from outside, at any moment; the limits end a process by others. The kernel sends SIGKILL if the machine has
# no memory left.
KILLED_BY = (-signal.SIGKILL, -signal.SIGTERM, -signal.SIGHUP)
_ROOT = Path(__file__).parents[3]

T = TypeVar("T")


class KilledError(Exception):
    """The process was killed from outside, and nothing that it was given is to blame."""


class PipedProcesses:
    """Used in the event loop. The first process starts with the first exchange; `close` ends all."""

    def __init__(
        self,
        module: str,
        *arguments: str,
        task: str,
        count: int = 1,
        env: Mapping[str, str] | None = None,
        has_spare: bool = False,
    ) -> None:
        """Each runs `python -m module arguments`. task: what it does, such as "decodes pictures".

        count: how many there are at most, which callers keep to. env: their environment; None: the gateway's.
        has_spare: who gets the last idle process starts another one, so that the next does not wait for it
        """
        # Not by asyncio: uvloop runs Python in the child between fork and exec, where it crashes now and then.
        self._command = [sys.executable, "-m", module, *arguments]
        self._env = env
        self._task = task
        self._count, self._has_spare = count, has_spare
        self._threads = ThreadPoolExecutor(count, thread_name_prefix=task.split()[-1])
        self.idle: list[subprocess.Popen[bytes]] = []
        self._busy: set[subprocess.Popen[bytes]] = set()

    async def run(self, exchange: Callable[[subprocess.Popen[bytes]], T], timeout_s: float, what: str) -> T:
        """What `exchange` makes of a process's answer. It runs on a thread, and ends when the process does.

        It may raise `InvalidRequest`, and `KilledError`; the process is used again if it is alive. Raises
        `CapacityError` if it takes too long, or no process can be started; `what`: says what then has not been done.
        """
        for _ in range(MAX_KILLS):
            try:
                process = self._take()
            except OSError as error:  # no memory, or too many processes or open files, perhaps for a moment
                raise CapacityError(f"the process that {self._task} cannot be started: {error}") from error
            self._busy.add(process)
            if self._has_spare and not self.idle and len(self._busy) < self._count:
                try:
                    self.idle.append(self._start())
                except OSError as error:  # the next one tries it again
                    log.warning(f"no spare process that {self._task} could be started", reason=str(error))
            has_answered = False
            try:
                async with asyncio.timeout(timeout_s):
                    found = await asyncio.get_running_loop().run_in_executor(self._threads, exchange, process)
                has_answered = True
                return found
            except TimeoutError:
                raise CapacityError(f"{what} within {timeout_s:g} s") from None
            except InvalidRequest:
                has_answered = True
                raise
            except KilledError:
                continue
            finally:
                self._busy.discard(process)
                if has_answered and process.poll() is None:
                    self.idle.append(process)
                else:
                    process.kill()  # its thread then ends
        raise CapacityError(f"the process that {self._task} was killed {MAX_KILLS} times")

    def _take(self) -> subprocess.Popen[bytes]:
        """An idle process that is alive, or a new one."""
        while self.idle:
            process = self.idle.pop()
            if process.poll() is None:
                return process
            log.warning(f"an idle process that {self._task} has ended", status=close_process(process))
        return self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=_ROOT, env=self._env
        )

    async def close(self) -> None:
        """Ends the processes."""
        for process in (*self.idle, *self._busy):
            process.kill()
        await asyncio.to_thread(self._threads.shutdown)
        for process in self.idle:
            await asyncio.to_thread(close_process, process)
        self.idle.clear()


def write_and_read(process: subprocess.Popen[bytes], most: int, *message: bytes) -> bytes:
    """Writes a message and reads a line of at most so many bytes. It has no end if the process has ended."""
    assert process.stdin is not None and process.stdout is not None, "they are pipes"
    with contextlib.suppress(BrokenPipeError):  # then there is no answer either
        process.stdin.writelines(message)
        process.stdin.flush()
    return process.stdout.readline(most)


def read_rest(process: subprocess.Popen[bytes], num_bytes: int) -> bytes:
    """What follows the line; less if the process has ended."""
    assert process.stdout is not None, "it is a pipe"
    return process.stdout.read(num_bytes)


def end_of(process: subprocess.Popen[bytes], task: str) -> int:
    """The exit status of a process that has ended in its `task`. Raises `KilledError` if that was done from outside."""
    status = close_process(process)
    log.warning(f"the process that {task} has ended", status=status)
    if status in KILLED_BY:
        raise KilledError
    return status


def close_process(process: subprocess.Popen[bytes]) -> int:
    """Closes the pipes of a process that ends; returns its exit status when it has ended."""
    assert process.stdin is not None and process.stdout is not None, "they are pipes"
    with contextlib.suppress(BrokenPipeError):  # what was to be written has been written in part
        process.stdin.close()
    process.stdout.close()
    return process.wait()
