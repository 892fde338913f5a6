"""`DecodingProcesses`: a few processes that decode files of clients, each for one client at a time."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import structlog

from services.common.errors import CapacityError, InvalidRequest
from services.gateway.resources.piped_process import KilledError, close_process, start_process

log = structlog.get_logger()

MAX_KILLS = 2  # of the process, for one file

T = TypeVar("T")


class DecodingProcesses:
    """Used in the event loop. The first process starts with the first file; `close` ends all."""

    def __init__(
        self,
        module: str,
        argument: str,
        count: int,
        *,
        kind: str,
        env: Mapping[str, str] | None = None,
        has_spare: bool = False,
    ) -> None:
        """count: how many there are at most, which callers keep to. kind: of the files, such as "pictures".
        has_spare: a file that gets the last idle process starts another one, so that the next file does not wait for it
        """
        self._command = module, argument
        self._env = env
        self._task = f"decodes {kind}"
        self._count, self._has_spare = count, has_spare
        self._threads = ThreadPoolExecutor(count, thread_name_prefix=kind)
        self.idle: list[subprocess.Popen[bytes]] = []
        self._busy: set[subprocess.Popen[bytes]] = set()

    async def run(self, exchange: Callable[[subprocess.Popen[bytes]], T], timeout_s: float, what: str) -> T:
        """What `exchange` makes of a process's answer. It runs on a thread, and ends when the process does.

        It may raise `InvalidRequest`, after which the process is used again if it is alive, and `KilledError`. Raises
        `CapacityError` if it takes too long; `what`: that is decoded.
        """
        for _ in range(MAX_KILLS):
            process = self._take()
            self._busy.add(process)
            if self._has_spare and not self.idle and len(self._busy) < self._count:
                try:
                    self.idle.append(start_process(*self._command, env=self._env))
                except OSError as error:  # the next one tries it again
                    log.warning(f"no spare process that {self._task} could be started", reason=str(error))
            is_free = False
            try:
                async with asyncio.timeout(timeout_s):
                    found = await asyncio.get_running_loop().run_in_executor(self._threads, exchange, process)
                is_free = True
                return found
            except TimeoutError:
                raise CapacityError(f"{what} has not been decoded within {timeout_s:g} s") from None
            except InvalidRequest:
                is_free = process.poll() is None
                raise
            except KilledError:
                continue
            finally:
                self._busy.discard(process)
                if is_free:
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
        return start_process(*self._command, env=self._env)

    async def close(self) -> None:
        """Ends the processes."""
        for process in (*self.idle, *self._busy):
            process.kill()
        await asyncio.to_thread(self._threads.shutdown)
        for process in self.idle:
            await asyncio.to_thread(close_process, process)
        self.idle.clear()
