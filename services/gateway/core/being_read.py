"""`BeingRead`: requests that wait to be read, for memory, pictures, the tokenizer or a grammar. They can be aborted.

The journal does not know them yet. Runs in the event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Set
from contextlib import AbstractAsyncContextManager
from types import TracebackType

from services.common.errors import AbortedByCaller
from services.gateway.request.generation_request import Owner


class BeingRead:
    """One for a gateway process."""

    def __init__(self) -> None:
        self._readings: set[_Reading] = set()

    def until_started(self, owner: Owner, names: Iterable[str]) -> AbstractAsyncContextManager[Set[str]]:
        """A context in which the owner's requests with these names are read. Raises `AbortedByCaller` if all of them
        are aborted; gives the names of those that are.
        """
        return _Reading(self._readings, owner, frozenset(names))

    def abort(self, owner: Owner, is_meant: Callable[[str], bool]) -> bool:
        """Ends those of an owner with such a name; returns whether there are any, of which some may be ending."""
        found = False
        for reading in self._readings:
            if reading.owner == owner and (meant := set(filter(is_meant, reading.names))):
                found = True
                reading.abort(meant)
        return found


class _Reading(AbstractAsyncContextManager[Set[str]]):
    """Every request has one before anybody may wait for it, so it is no generator with a timeout of asyncio inside."""

    def __init__(self, readings: set[_Reading], owner: Owner, names: frozenset[str]) -> None:
        self.owner, self.names = owner, names
        self.aborted: set[str] = set()  # some of the names
        self._readings = readings  # those that have begun and not ended
        self._is_ending = False

    def abort(self, names: Set[str]) -> None:
        self.aborted |= names
        if len(self.aborted) == len(self.names) and not self._is_ending:
            self._is_ending = True
            self._task.cancel()

    async def __aenter__(self) -> Set[str]:
        task = asyncio.current_task()
        assert task is not None, "coroutines run in tasks"
        self._task, self._num_cancelled = task, task.cancelling()  # by others
        self._readings.add(self)
        return self.aborted

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._readings.remove(self)
        if not self._is_ending:
            return
        is_cancelled_by_others = self._task.uncancel() > self._num_cancelled
        if kind is None or (kind is asyncio.CancelledError and not is_cancelled_by_others):
            raise AbortedByCaller("the request was aborted before it ran") from error
