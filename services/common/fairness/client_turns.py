"""`ClientTurns`: what only few may do at once, such as compiling grammars, is done by clients in turns.

It is round robin: among the tenants that have something waiting, and within a tenant among its clients. A client's own
requests keep their order. So however much one client has waiting, another one waits for two of its turns at most.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator

from services.common.errors import CapacityError

Client = tuple[int, int]  # numbers of the tenant, which is an API key, and of the client's address


class ClientTurns:
    """Used in one event loop."""

    def __init__(self, num_places: int, max_wait_s: float | None = None, what: str = "") -> None:
        """`num_places`: how many may have a turn at once. `max_wait_s`: how long `what` may wait for one."""
        self._num_free = num_places  # above 0 only while nobody waits
        # Tenants, and the clients of each, in the order of their turns. None of these containers is empty.
        self._waiting: dict[int, dict[int, deque[asyncio.Future[None]]]] = {}
        self._max_wait_s = max_wait_s
        self._what = what

    @contextlib.asynccontextmanager
    async def turn(self, client: Client) -> AsyncIterator[None]:
        """Waits for a turn of this client, which lasts as long as the context. Raises `CapacityError`."""
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
        if self._num_free:
            self._num_free -= 1
            return
        tenant, address = client
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, {}).setdefault(address, deque()).append(place)
        try:
            await place
        except asyncio.CancelledError:
            if not place.cancelled():
                self._pass_on()  # it had its place already
            raise

    def _pass_on(self) -> None:
        """Gives a place to whoever is next."""
        while self._waiting:
            place = self._take_next()
            if not place.done():  # else it was cancelled
                place.set_result(None)
                return
        self._num_free += 1

    def _take_next(self) -> asyncio.Future[None]:
        """Takes out the one whose turn it is. Its client, and its tenant, go to the end."""
        tenant = next(iter(self._waiting))
        clients = self._waiting.pop(tenant)
        address = next(iter(clients))
        places = clients.pop(address)
        place = places.popleft()
        if places:
            clients[address] = places
        if clients:
            self._waiting[tenant] = clients
        return place
