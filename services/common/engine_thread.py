"""`EngineThread`: the one thread of a worker that owns its device. It makes the calls that others post, in order."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, NoReturn, TypeVar

R = TypeVar("R")


class EngineThread:
    """Call `start`; then `post` and `submit` from any thread; at last `stop`.

    When all calls that have come are made, the thread does its `work`. That returns how many seconds the thread may
    then wait for the next call: 0 for not at all, None for as long as it takes.
    """

    def __init__(self, work: Callable[[], float | None] = lambda: None) -> None:
        self.failure: Future[NoReturn] = Future()  # the error that ends the thread, if one does
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
        """Ends the thread after the call or the work it is in; calls that it has not come to are cancelled.

        Blocks up to `timeout_s` seconds. Returns whether the thread has ended.
        """
        self._is_stopping = True
        self.post(lambda: None)  # wakes it
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def post(self, function: Callable[..., object], *arguments: Any) -> None:
        """Has the thread call it, after all that was posted before; never blocks. Its error ends the thread."""
        self._calls.put((None, function, arguments))

    def submit(self, function: Callable[..., R], *arguments: Any) -> Future[R]:
        """Like `post`, but what it returns or raises is in the future; cancelled when the thread has ended."""
        future: Future[R] = Future()
        self._calls.put((future, function, arguments))
        if self._has_ended:
            self._cancel_calls()
        return future

    def make_call(self, timeout_s: float | None) -> bool:
        """Waits for the next call and makes it; False: none has come. On this thread, also within its work."""
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
        del future  # or the error's traceback would keep it, and it the error
    else:
        future.set_result(result)
