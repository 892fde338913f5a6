"""`Children`: the services that the launcher keeps running. They may change while it runs."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from functools import partial

from services.launch.child import Child


class Children:
    """The services in starting order. Used in the event loop; may be iterated on any thread."""

    def __init__(self) -> None:
        self._children: list[Child] = []
        self._failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def __iter__(self) -> Iterator[Child]:
        return iter(list(self._children))

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
        """Starts a service, a new one or one that has ended."""
        child.start()
        self.adopt(child)

    def adopt(self, child: Child) -> None:
        """Adds a service that has been started."""
        if child not in self._children:
            self._children.append(child)
        child.watching.add_done_callback(partial(self._note_end, child))

    async def forget(self, child: Child) -> None:
        """Leaves out a service that has been stopped."""
        self._children.remove(child)
        await asyncio.gather(child.watching, return_exceptions=True)

    def replace(self, old: Child, new: Child) -> None:
        """Replaces a service by another one that has been started."""
        self._children[self._children.index(old)] = new
        self.adopt(new)

    async def wait_failure(self) -> None:
        """Waits for a service to fail for good, and raises its error."""
        await asyncio.shield(self._failure)

    async def stop(self, grace_s: float) -> None:
        """Asks all services to stop, in reverse order, and kills those that still run after `grace_s` seconds."""
        for child in reversed(list(self)):
            child.stop()
        await asyncio.gather(*(child.wait(grace_s) for child in self))
        for child in self:
            child.watching.cancel()  # it may be waiting to restart a service
        await asyncio.gather(*(child.watching for child in self), return_exceptions=True)

    def _note_end(self, child: Child, watching: asyncio.Task[None]) -> None:
        if watching.cancelled() or self._failure.done() or child not in self._children:
            return
        error = watching.exception()
        if error is not None:
            self._failure.set_exception(error)
