"""`EngineThread`: the thread of a worker that owns its device. It makes posted calls in order."""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import queue
import select
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any, NoReturn, TypeAlias, TypeVar

IDLE_POLL_S = 1.0  # longest sleep of an idle thread that has deadlines to check

_PR_SET_TIMERSLACK = 29  # of prctl, in nanoseconds

R = TypeVar("R")
_Call: TypeAlias = tuple[Future[Any] | None, Callable[..., Any], tuple[Any, ...]]


class EngineThread:
    """Call `start`, then `post` and `submit` from any thread, finally `stop`.

    When all posted calls are made, the thread calls `work`, which returns how many seconds the thread may wait for the
    next call: 0 means not at all, None means without a limit.
    """

    def __init__(self, work: Callable[[], float | None] = lambda: None) -> None:
        self.failure: Future[NoReturn] = Future()  # the error that ended the thread, if one did
        self._work = work
        self._calls = _Calls()
        self._is_stopping = False
        self._has_ended = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def stop(self, timeout_s: float) -> bool:
        """Ends the thread after its current call or work. Calls not made yet are cancelled.

        Blocks up to `timeout_s` seconds. Returns whether the thread has ended.
        """
        self._is_stopping = True
        self.post(lambda: None)  # wakes it
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def post(self, function: Callable[..., object], *arguments: Any) -> None:
        """Posts a call, which the thread makes after all earlier ones; never blocks. Its error ends the thread."""
        self._calls.put((None, function, arguments))

    def submit(self, function: Callable[..., R], *arguments: Any) -> Future[R]:
        """Like `post`, but the future gets the call's result or error; cancelled if the thread has ended."""
        future: Future[R] = Future()
        self._calls.put((future, function, arguments))
        if self._has_ended:
            self._cancel_calls()
        return future

    def read(self, file: int, on_readable: Callable[[], bool]) -> None:
        """Has `on_readable` called, as if it were posted, whenever the file has something to read, until it returns
        False. For this thread; other threads `post` it.
        """
        self._calls.read(file, on_readable)

    def make_call(self, timeout_s: float | None) -> bool:
        """Waits for the next call and makes it; returns False if none arrived. For this thread, also within `work`."""
        try:
            future, function, arguments = self._calls.get(timeout_s)
        except queue.Empty:
            return False
        if future is None:
            function(*arguments)
        elif future.set_running_or_notify_cancel():
            _fulfil(future, function, arguments)
        return True

    def _run(self) -> None:
        try:
            timeout_s: float | None = 0.0
            while not self._is_stopping:
                has_come = self.make_call(timeout_s)
                while has_come and not self._is_stopping:
                    has_come = self.make_call(0.0)
                timeout_s = self._work()
        except BaseException as error:
            self.failure.set_exception(error)
        finally:
            self._has_ended = True
            self._cancel_calls()

    def _cancel_calls(self) -> None:
        for future, *_ in self._calls.take_all():
            if future is not None:
                future.cancel()


def end_waits_in_time() -> None:
    """Has each wait of the calling thread end when its time is over: otherwise Linux may let it last 50 µs longer."""
    ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1)


class _Calls:
    """A queue whose reader may wait for microseconds, or also for files, and then for milliseconds.

    With `queue.SimpleQueue` of CPython 3.11 and 3.12 it would sometimes wait until the next call comes, however long
    that takes: if the time is over before its `get` has looked twice, what is left of it is negative, which means for
    ever.
    """

    def __init__(self) -> None:
        self._calls = deque[_Call]()
        self._has_come = threading.Lock()  # free if a call may have come since the reader has looked
        self._has_come.acquire()
        self._poll: select.poll | None = None  # None: no file is waited for
        self._wake_file: int | None = None  # in place of the lock, if files are waited for
        self._on_readable: dict[int, Callable[[], bool]] = {}  # by file

    def put(self, call: _Call) -> None:
        """Never blocks. For any thread."""
        self._calls.append(call)  # before it looks how the reader waits, who looks here when that has changed
        if (wake_file := self._wake_file) is not None:
            os.eventfd_write(wake_file, 1)
        elif self._has_come.locked():
            with contextlib.suppress(RuntimeError):  # another thread has just done it
                self._has_come.release()

    def get(self, timeout_s: float | None) -> _Call:
        """The oldest call. Raises `queue.Empty` if none comes in time; None: waits until one comes. For one thread."""
        if self._calls:
            return self._calls.popleft()
        if timeout_s == 0.0 and self._poll is None:
            raise queue.Empty
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while not self._calls:
            left_s = -1.0 if deadline is None else max(0.0, deadline - time.monotonic())
            if self._poll is not None:
                self._wait_for_files(self._poll, left_s)
            elif not self._has_come.acquire(timeout=left_s):
                raise queue.Empty
        return self._calls.popleft()

    def read(self, file: int, on_readable: Callable[[], bool]) -> None:
        """Makes a call of what can be read. For the thread that calls `get`."""
        if self._poll is None:
            self._poll, wake_file = select.poll(), os.eventfd(0)
            self._poll.register(wake_file, select.POLLIN)
            weakref.finalize(self, os.close, wake_file)  # not before: any thread may still wake this one
            self._wake_file = wake_file
        self._on_readable[file] = on_readable
        self._poll.register(file, select.POLLIN)

    def _wait_for_files(self, poll: select.poll, left_s: float) -> None:
        """left_s: negative means without a limit. Raises `queue.Empty` if nothing comes in time."""
        if not (ready := poll.poll(math.ceil(1e3 * left_s))):
            raise queue.Empty
        for file, _ in ready:
            if file == self._wake_file:
                os.eventfd_read(file)
            else:
                self._calls.append((None, self._read, (file,)))

    def _read(self, file: int) -> None:
        if not self._on_readable[file]():
            assert self._poll is not None, "it was waited for"
            del self._on_readable[file]
            self._poll.unregister(file)

    def take_all(self) -> Iterator[_Call]:
        """What is left when nobody calls `get` any more. For any thread."""
        with contextlib.suppress(IndexError):
            while True:
                yield self._calls.popleft()


def _fulfil(future: Future[R], function: Callable[..., R], arguments: tuple[Any, ...]) -> None:
    try:
        result = function(*arguments)
    except BaseException as error:
        future.set_exception(error)
        del future  # otherwise future and traceback would refer to each other
    else:
        future.set_result(result)
