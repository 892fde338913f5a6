"""`Children`: the services that the launcher keeps running. They may change while it runs."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from services.launch.child import Child


class Children:
    """The services in starting order. Used in the event loop; may be iterated on any thread."""

    def __init__(self) -> None:
        self._watchers: dict[Child, asyncio.Task[None]] = {}
        self._failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def __iter__(self) -> Iterator[Child]:
        return iter(list(self._watchers))

    def of_role(self, role: str) -> list[Child]:
        """The services of one role; of several ranks, or of several attention workers, the first one's."""
        return [
            child
            for child in self
            if child.role == role and child.options.rank == child.options.attention_index == 0
        ]

    def worker(self, role: str, rank: int) -> Child:
        """The worker of a rank; of several attention workers the first one."""
        options = [(child, child.options) for child in self if child.role == role]
        [child] = [child for child, own in options if own.rank == rank and own.attention_index == 0]
        return child

    def start(self, child: Child) -> None:
        """Starts and watches a service."""
        self._watchers[child] = asyncio.create_task(child.watch())
        self._watchers[child].add_done_callback(self._note_end)

    def adopt(self, child: Child, watcher: asyncio.Task[None]) -> None:
        """Adds a service, which its `watch` task `watcher` has started."""
        self._watchers[child] = watcher
        watcher.add_done_callback(self._note_end)

    async def forget(self, child: Child) -> None:
        """Leaves out a service that has been stopped."""
        await asyncio.gather(self._watchers.pop(child), return_exceptions=True)

    def replace(self, old: Child, new: Child, watcher: asyncio.Task[None]) -> None:
        """Replaces a service by another one, which its `watch` task `watcher` has started."""
        self._watchers = {new if child is old else child: each for child, each in self._watchers.items()}
        self._watchers[new] = watcher
        watcher.add_done_callback(self._note_end)

    def has_ended(self, child: Child) -> bool:
        """Whether this service has ended for good."""
        return self._watchers[child].done()

    async def wait_failure(self) -> None:
        """Waits for a service to fail for good, and raises its error."""
        await asyncio.shield(self._failure)

    async def stop(self, grace_s: float) -> None:
        """Asks all services to stop, in reverse order, and kills those that still run after `grace_s` seconds."""
        for child in reversed(list(self)):
            child.stop()
        await asyncio.gather(*(child.wait(grace_s) for child in self))
        for watcher in self._watchers.values():
            watcher.cancel()  # it may be waiting to restart a service
        await asyncio.gather(*self._watchers.values(), return_exceptions=True)

    def _note_end(self, watcher: asyncio.Task[None]) -> None:
        if watcher.cancelled() or self._failure.done() or watcher not in self._watchers.values():
            return
        error = watcher.exception()
        if error is not None:
            self._failure.set_exception(error)
