"""`Inbox`: what other threads want of the engine thread, in order."""

from __future__ import annotations

import queue
from collections.abc import Callable
from typing import Any

IDLE_POLL_S = 1.0  # how long an idle engine sleeps at most, before it looks at its deadlines


class Inbox:
    """`post` from any thread; the rest is the engine thread's."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[tuple[Callable[..., None], tuple[Any, ...]]] = queue.SimpleQueue()

    def post(self, function: Callable[..., None], *arguments: Any) -> None:
        """Has the engine thread call it, after all that was posted before; never blocks."""
        self._calls.put((function, arguments))

    def handle_one(self, timeout_s: float) -> bool:
        """Waits up to `timeout_s` for a call and makes it; False: none came."""
        try:
            function, arguments = self._calls.get(timeout=timeout_s)
        except queue.Empty:
            return False
        function(*arguments)
        return True

    def handle_all(self, is_idle: bool) -> None:
        """Makes all calls that are here; when idle, waits for one first, `IDLE_POLL_S` at most."""
        if is_idle and not self.handle_one(IDLE_POLL_S):
            return
        while True:
            try:
                function, arguments = self._calls.get_nowait()
            except queue.Empty:
                return
            function(*arguments)
