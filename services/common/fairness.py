"""Fairness among clients: they take turns, and of each queue the last part is kept for those that have little in it.

`ClientQueue` has items of several, `ClientTurns` is for what only few may do at once. Turns are round robin: among the
tenants that have something in the queue, and within a tenant among its clients. A client's own items keep their order.
So however many one client has, another one's first item comes after two of them at most.

The gateways' queues and the dense worker's keep room in this way: see `may_wait`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator
from typing import Generic, TypeVar

from services.common.errors import CapacityError

Client = tuple[int, int]  # numbers of the tenant, which is an API key, and of the client's address

T = TypeVar("T")
KEPT_PARTS = 8  # one part in so many of a queue is kept for clients that have nothing else in it, or little
SMALL_PARTS = 64  # little is at most one part in so many


class ClientQueue(Generic[T]):
    """Items, each of a client. False while it is empty."""

    def __init__(self) -> None:
        # Tenants, and the clients of each, in the order of their turns. None of these containers is empty.
        self._waiting: dict[int, dict[int, deque[T]]] = {}

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def put(self, client: Client, item: T, *, is_first: bool = False) -> None:
        """Adds an item at the end of its client's, or before them."""
        tenant, address = client
        items = self._waiting.setdefault(tenant, {}).setdefault(address, deque())
        if is_first:
            items.appendleft(item)
        else:
            items.append(item)

    def take(self) -> T:
        """Takes out the one whose turn it is. Its client, and its tenant, go to the end."""
        tenant = next(iter(self._waiting))
        clients = self._waiting.pop(tenant)
        address = next(iter(clients))
        items = clients.pop(address)
        item = items.popleft()
        if items:
            clients[address] = items
        if clients:
            self._waiting[tenant] = clients
        return item


class ClientTurns:
    """Turns at something, such as compiling grammars. Used in one event loop."""

    def __init__(self, num_places: int, max_wait_s: float | None = None, what: str = "") -> None:
        """`num_places`: how many may have a turn at once. `max_wait_s`: how long `what` may wait for one."""
        self._num_free = num_places  # above 0 only while nobody waits
        self._waiting = ClientQueue[asyncio.Future[None]]()
        self._max_wait_s = max_wait_s
        self._what = what

    @property
    def is_free(self) -> bool:
        """Whether a turn begins without a wait."""
        return self._num_free > 0

    @contextlib.asynccontextmanager
    async def turn(self, client: Client, *, goes_on: bool = False) -> AsyncIterator[None]:
        """Waits for a turn of this client, which lasts as long as the context. Raises `CapacityError`.

        `goes_on`: before others of this client, because it has had a turn already.
        """
        if self._num_free:
            self._num_free -= 1
        else:
            try:
                async with asyncio.timeout(self._max_wait_s):
                    await self._wait(client, goes_on)
            except TimeoutError:
                raise CapacityError(f"{self._what} has waited {self._max_wait_s:g} s for its turn, the limit") from None
        try:
            yield
        finally:
            self._pass_on()

    async def _wait(self, client: Client, goes_on: bool) -> None:
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.put(client, place, is_first=goes_on)
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


def may_wait(limit: int, num_waiting: int, num_own: int, num_more: int) -> bool:
    """Whether a client with `num_own` of the `num_waiting` in a queue may add `num_more`, if the queue has room."""
    return is_little(limit, num_own, num_more) or num_waiting + num_more <= limit - limit // KEPT_PARTS


def is_little(limit: int, num_own: int, num_more: int) -> bool:
    """Whether a client with `num_own` that adds `num_more` may use all of the limit."""
    return num_own == 0 or num_own + num_more <= limit // SMALL_PARTS


def refusal(what: str, num_more: int, limit: int) -> str:
    """What to tell a client that has `what` and may not add `num_more`."""
    return (
        f"this client has {what}; with {num_more} more it would use the last 1/{KEPT_PARTS} of the limit of "
        f"{limit}, which is kept for clients with at most 1/{SMALL_PARTS} of it"
    )
