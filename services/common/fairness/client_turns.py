"""`ClientTurns`: what only few may do at once, such as compiling grammars, is done by clients in turns."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from services.common.errors import CapacityError
from services.common.fairness.client_queue import Client, ClientQueue


class ClientTurns:
    """Used in one event loop."""

    def __init__(self, num_places: int, max_wait_s: float | None = None, what: str = "") -> None:
        """`num_places`: how many may have a turn at once. `max_wait_s`: how long `what` may wait for one."""
        self._num_free = num_places  # above 0 only while nobody waits
        self._waiting = ClientQueue[asyncio.Future[None]]()
        self._max_wait_s = max_wait_s
        self._what = what

    @contextlib.asynccontextmanager
    async def turn(self, client: Client) -> AsyncIterator[None]:
        """Waits for a turn of this client, which lasts as long as the context. Raises `CapacityError`."""
        if self._num_free:
            self._num_free -= 1
        else:
            try:
                async with asyncio.timeout(self._max_wait_s):
                    await self._wait(client)
            except TimeoutError:
                raise CapacityError(f"{self._what} has waited {self._max_wait_s:g} s for its turn, the limit") from None
        try:
            yield
        finally:
            self._pass_on()

    async def _wait(self, client: Client) -> None:
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.put(client, place)
        try:
            await place
        except asyncio.CancelledError:
            if not place.cancelled():
                self._pass_on()  # it had its place already
            raise

    def _pass_on(self) -> None:
        """Gives a place to whoever is next."""
        while self._waiting:
            place = self._waiting.take()
            if not place.done():  # else it was cancelled
                place.set_result(None)
                return
        self._num_free += 1
