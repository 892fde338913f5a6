"""`Children`: the services that the launcher keeps running. Which they are may change while it runs."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from services.launch.child import Child


class Children:
    """In starting order. Lives in the event loop; may be iterated on any thread."""

    def __init__(self) -> None:
        self._watchers: dict[Child, asyncio.Task[None]] = {}
        self._failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def __iter__(self) -> Iterator[Child]:
        return iter(list(self._watchers))

    def of_role(self, role: str) -> list[Child]:
        """Those of one kind of service."""
        return [child for child in self if child.role == role]

    def start(self, child: Child) -> None:
        """Starts a service, which is watched from now on."""
        self._watchers[child] = asyncio.create_task(child.watch())
        self._watchers[child].add_done_callback(self._note_end)

    def exchange(self, old: Child, new: Child, watcher: asyncio.Task[None]) -> None:
        """Takes over a service that `watcher`, its `watch`, has started; lets go of the one in its place."""
        self._watchers = {new if child is old else child: each for child, each in self._watchers.items()}
        self._watchers[new] = watcher
        watcher.add_done_callback(self._note_end)

    def has_ended(self, child: Child) -> bool:
        """Whether nobody starts this service again."""
        return self._watchers[child].done()

    async def wait_failure(self) -> None:
        """Raises what ends a service for good."""
        await asyncio.shield(self._failure)

    async def stop(self, grace_s: float) -> None:
        """Asks all to stop, in reverse order, and ends those that have not after `grace_s` seconds."""
        for child in reversed(list(self)):
            child.stop()
        await asyncio.gather(*(child.wait(grace_s) for child in self))
        for watcher in self._watchers.values():
            watcher.cancel()  # it may be waiting to start a service again
        await asyncio.gather(*self._watchers.values(), return_exceptions=True)

    def _note_end(self, watcher: asyncio.Task[None]) -> None:
        if watcher.cancelled() or self._failure.done() or watcher not in self._watchers.values():
            return
        error = watcher.exception()
        if error is not None:
            self._failure.set_exception(error)
