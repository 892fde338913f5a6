"""`Outbox`: what is still to be written to a dense worker. Used in the gateway's event loop.

A request may have hundreds of sequences, and to write one may take milliseconds. So clients take turns: nobody's
sequence waits until all those of another client are written. Those of a request that share pictures or vectors are
written together, because a worker forgets these in favour of others'.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable
from typing import TypeAlias

from services.common.fairness import ClientQueue
from services.gateway.link.journal_entry import JournalEntry
from services.pb import dense_pb2

Item: TypeAlias = JournalEntry | dense_pb2.GatewayMessage | None  # a sequence to submit; None ends the stream


class Outbox:
    """Of one stream, from its beginning. `take` is for one caller at a time."""

    def __init__(self, first: Iterable[Item]) -> None:
        """`first`: what goes before all else, in this order."""
        self._first = deque(first)
        self._groups = ClientQueue[deque[JournalEntry]]()  # of sequences that are written together
        self._group = deque[JournalEntry]()  # whose turn it is
        self._newest = deque[JournalEntry]()  # the one that was added last
        self._has_some = asyncio.Event()
        if self._first:
            self._has_some.set()

    def __bool__(self) -> bool:
        """Whether anything waits."""
        return self._has_some.is_set()

    def put(self, message: dense_pb2.GatewayMessage | None) -> None:
        """Adds a message, which goes before all sequences that wait for their turns.

        It may cancel one of them, which then is not submitted any more.
        """
        self._first.append(message)
        self._has_some.set()

    def submit(self, entry: JournalEntry) -> None:
        """Adds a sequence, which waits for its client's turn."""
        request = entry.request
        shares = bool(request.pictures) or request.prompt_embeds is not None
        if shares and self._newest and self._newest[-1].request is request:
            self._newest.append(entry)
            return
        self._newest = deque([entry])
        self._groups.put(entry.spec.client_id, self._newest)
        self._has_some.set()

    async def take(self) -> Item:
        """Waits for the next one."""
        await self._has_some.wait()
        if self._first:
            item = self._first.popleft()
        else:
            if not self._group:
                self._group = self._groups.take()
            item = self._group.popleft()
        if not (self._first or self._group or self._groups):
            self._has_some.clear()
        return item
