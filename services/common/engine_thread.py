"""`EngineThread`: the thread of a worker that owns its device. It makes posted calls in order."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, NoReturn, TypeVar

R = TypeVar("R")


class EngineThread:
    """Call `start`, then `post` and `submit` from any thread, finally `stop`.

    When all posted calls are made, the thread calls `work`, which returns how many seconds the thread may wait for the
    next call: 0 means not at all, None means without a limit.
    """

    def __init__(self, work: Callable[[], float | None] = lambda: None) -> None:
        self.failure: Future[NoReturn] = Future()  # the error that ended the thread, if one did
        self._work = work
        self._calls: queue.SimpleQueue[tuple[Future[Any] | None, Callable[..., Any], tuple[Any, ...]]]
        self._calls = queue.SimpleQueue()
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

    def make_call(self, timeout_s: float | None) -> bool:
        """Waits for the next call and makes it; returns False if none arrived. For this thread, also within `work`."""
        try:
            future, function, arguments = self._calls.get(timeout=timeout_s)
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
        while True:
            try:
                future, *_ = self._calls.get_nowait()
            except queue.Empty:
                return
            if future is not None:
                future.cancel()


def _fulfil(future: Future[R], function: Callable[..., R], arguments: tuple[Any, ...]) -> None:
    try:
        result = function(*arguments)
    except BaseException as error:
        future.set_exception(error)
        del future  # otherwise future and traceback would refer to each other
    else:
        future.set_result(result)
