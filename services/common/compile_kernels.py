"""`compiling_together`: Triton's kernels compiled side by side, by both workers.

Most of a compilation holds Python's lock, so threads would compile little faster than one. Forked processes compile
what Triton's cache does not have, and put it there; new ones would import torch for seconds first. They never use the
GPU, and wait for no lock that another thread has at the fork: no other one compiles for Triton, gRPC's handlers are off
(`set_up_grpc`), modules are imported before, and glibc frees its own locks. One that waits all the same is ended. What
is missing in the end is compiled here, as is what fails, with its error.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import importlib
import os
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any

import structlog
import triton
from triton.runtime import driver
from triton.runtime.cache import get_cache_manager

from services.common.process import PR_SET_PDEATHSIG, available_cores

log = structlog.get_logger()

_MAX_COMPILE_S = 30.0  # of the forked processes; the longest took 4 s
_MAX_PROCESSES = 16  # each takes some 100 MB, and its fork 40 ms
_POLL_S = 0.01
# Triton's launchers are modules of one name: of two that are loaded at once, both kernels would get the same one.
_LOADING = threading.Lock()
# A module that another thread imports at a fork can never be imported in the forked process.
_IMPORTED = ("triton.experimental.gluon", "triton.experimental.gluon.nvidia.hopper", "triton.backends.nvidia.compiler")


@contextlib.contextmanager
def compiling_together() -> Iterator[None]:
    """A context in which kernels that are warmed up are only noted. At its end all are compiled and loaded.

    For one thread, whose current device they are for.
    """
    noted = _Noted()
    with triton.AsyncCompileMode(noted):
        try:
            yield
            noted.compile()
        finally:
            noted.leave_rest()
    noted.check()


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, only_compiles: bool, **constants: Any) -> None:
    """Launches a kernel, or only warms it up."""
    if only_compiles:
        kernel.warmup(*args, grid=grid, **constants)
    else:
        kernel[grid](*args, **constants)


class _Noted(Executor):
    """What `AsyncCompileMode` asks to compile."""

    def __init__(self) -> None:
        self._kernels: list[tuple[Future[Any], Callable[[], Any]]] = []
        self._errors: list[Exception] = []

    def submit(self, compile_kernel: Callable[[], Any]) -> Future[Any]:
        future = Future[Any]()
        self._kernels.append((future, compile_kernel))
        return future

    def compile(self) -> None:
        missing = [compile_kernel for future, compile_kernel in self._kernels if not _is_kept(future._key)]
        if len(missing) > 1:
            _compile_in_processes(missing)
        for future, compile_kernel in self._kernels:
            try:
                kernel = compile_kernel()
                with _LOADING:
                    kernel.run  # noqa: B018  # loads it
                future.set_result(kernel)
            except Exception as error:  # the mode would stay active if it raised it
                self._errors.append(error)

    def leave_rest(self) -> None:
        """Leaves what has failed, and what an error has kept from being compiled, to its first launch.

        The mode would wait for it forever.
        """
        for future, _ in self._kernels:
            if not future.done():
                future.set_result(None)  # as if Triton had never seen it

    def check(self) -> None:
        """Raises the first error of a compilation."""
        for error in self._errors:
            raise error


def _is_kept(key: str) -> bool:
    directory = getattr(get_cache_manager(hashlib.sha256(key.encode()).hexdigest()), "cache_dir", None)
    return directory is not None and any(Path(directory).glob("__grp__*.json"))


def _compile_in_processes(kernels: Sequence[Callable[[], Any]]) -> None:
    """Compiles into Triton's cache."""
    for name in _IMPORTED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    begin_s, count = time.monotonic(), min(len(kernels), available_cores(), _MAX_PROCESSES)
    running = set[int]()
    try:
        for index in range(count):
            running.add(_fork(kernels[index::count]))
    except OSError as error:  # for lack of memory, or too many processes
        log.warning("kernels are compiled by fewer processes", num_processes=len(running), reason=str(error))
    forked_s = time.monotonic() - begin_s
    while running and time.monotonic() < begin_s + _MAX_COMPILE_S:
        time.sleep(_POLL_S)
        running -= {pid for pid in running if _has_ended(pid)}
    for pid in running:
        log.warning("a compiling process is ended", pid=pid, reason=f"it took more than {_MAX_COMPILE_S:.0f} s")
        os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0)
    seconds = {"forked_s": round(forked_s, 3), "seconds": round(time.monotonic() - begin_s, 3)}
    log.info("kernels compiled", num_kernels=len(kernels), num_processes=count, **seconds)


def _has_ended(pid: int) -> bool:
    try:
        return os.waitpid(pid, os.WNOHANG)[0] != 0
    except ChildProcessError:  # the kernel reaps it: this process has inherited that SIGCHLD is ignored
        return True


def _fork(kernels: Sequence[Callable[[], Any]]) -> int:
    """The id of a process that compiles these kernels, and their launchers, and ends."""
    parent = os.getpid()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # locks of other threads: it needs none of them
        pid = os.fork()
    if pid:
        return pid
    try:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it has ended before: nobody would end this one, which has its ports and its device
            return 0  # ends below
        signal.set_wakeup_fd(-1)  # signals are no longer for the event loop, whose socket is the parent's
        for each in (signal.SIGINT, signal.SIGTERM):
            signal.signal(each, signal.SIG_DFL)
        for compile_kernel in kernels:
            with contextlib.suppress(Exception):
                kernel = compile_kernel()
                driver.active.launcher_cls(kernel.src, kernel.metadata)
    finally:
        os._exit(0)
