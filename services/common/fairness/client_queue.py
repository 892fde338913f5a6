"""`ClientQueue`: items of several clients, which take turns.

It is round robin: among the tenants that have something in it, and within a tenant among its clients. A client's own
items keep their order. So however many one client has in it, another one's first item comes after two of them at most.
"""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

Client = tuple[int, int]  # numbers of the tenant, which is an API key, and of the client's address

T = TypeVar("T")


class ClientQueue(Generic[T]):
    """False while it is empty."""

    def __init__(self) -> None:
        # Tenants, and the clients of each, in the order of their turns. None of these containers is empty.
        self._waiting: dict[int, dict[int, deque[T]]] = {}

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def put(self, client: Client, item: T) -> None:
        """Adds an item at the end of its client's."""
        tenant, address = client
        self._waiting.setdefault(tenant, {}).setdefault(address, deque()).append(item)

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
