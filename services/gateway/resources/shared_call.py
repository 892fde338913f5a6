"""`SharedCall`: one call for all who ask at about the same time, so that many clients cost no more than one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class SharedCall(Generic[T]):
    """Used in one event loop. At most one call runs at a time."""

    def __init__(self, call: Callable[[], Coroutine[Any, Any, T]], max_age_s: float) -> None:
        """`max_age_s`: how long after a call's beginning its result is still given."""
        self._call = call
        self._max_age_s = max_age_s
        self._running: asyncio.Task[T] | None = None
        self._stale_at = 0.0

    async def read(self) -> T:
        """What the call that runs now returns, or the last one if it is not too old, or else a new one."""
        loop = asyncio.get_running_loop()
        if self._running is None or (self._running.done() and loop.time() >= self._stale_at):
            self._running = asyncio.create_task(self._call())
            self._stale_at = loop.time() + self._max_age_s
        return await asyncio.shield(self._running)  # a cancelled caller does not cancel it for the others

    async def close(self) -> None:
        """Cancels a running call."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.wait([self._running])
