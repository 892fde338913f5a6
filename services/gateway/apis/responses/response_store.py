"""`ResponseStore`: the responses that a gateway process keeps in memory, by owner, within limits of number and size."""

from __future__ import annotations

import threading
from collections import OrderedDict, defaultdict
from collections.abc import Hashable
from dataclasses import dataclass

import structlog
from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

from services.gateway.apis.responses.event_log import EventLog

log = structlog.get_logger()

OVERHEAD_BYTES = 1024  # of one response, beside its JSON


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response and the conversation that it ends. Each holds the whole conversation, so none needs another one."""

    response: tuple[bytes, ...]  # joined they are the JSON of the whole object
    input_items: tuple[bytes, ...]  # JSON lists; joined they are the items that the model was given, oldest first
    output_items: bytes  # a JSON list
    is_background: bool = False
    events: EventLog | None = None  # if it was streamed in the background

    @property
    def num_bytes(self) -> int:
        """Also counts what it shares with earlier responses of its conversation."""
        num_bytes = sum(map(len, (*self.response, *self.input_items, self.output_items))) + OVERHEAD_BYTES
        return num_bytes if self.events is None else num_bytes + self.events.num_bytes

    @property
    def conversation(self) -> tuple[bytes, ...]:
        """JSON lists; joined they are all items, those of the answer last."""
        return (*self.input_items, self.output_items)


class StoredAnswer(Response):
    """A stored response as the answer to a request: its bytes are those in the store, however many read them."""

    media_type = "application/json"

    def __init__(self, stored: StoredResponse) -> None:
        super().__init__(headers={"content-length": str(sum(map(len, stored.response)))})
        self._pieces = stored.response

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        for piece in self._pieces:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class _Shelf(OrderedDict[str, StoredResponse]):
    """The responses of one owner by id, least recently used first."""

    num_bytes = 0


class ResponseStore:
    """Where a limit is reached, the least recently used responses are dropped: an owner's own, then any.

    An owner is an API key, or without keys a client's address; it finds its own responses only. `put` may be called in
    the thread that encodes an answer, so a lock guards everything.
    """

    def __init__(self, max_responses_of_owner: int, max_bytes_of_owner: int, max_bytes: int) -> None:
        self._max_responses_of_owner = max_responses_of_owner
        self.max_bytes_of_owner = min(max_bytes_of_owner, max_bytes)
        self._max_bytes = max_bytes
        self._shelves: defaultdict[Hashable, _Shelf] = defaultdict(_Shelf)
        self._by_use: OrderedDict[tuple[Hashable, str], None] = OrderedDict()
        self._lock = threading.Lock()
        self.num_bytes = 0

    def put(self, owner: Hashable, response_id: str, stored: StoredResponse) -> None:
        """Keeps a response, in place of another one with this id. One that is too large for its owner is not kept."""
        if stored.num_bytes > self.max_bytes_of_owner:
            log.warning(
                "response not stored", id=response_id, num_bytes=stored.num_bytes, max_bytes=self.max_bytes_of_owner
            )
            return
        with self._lock:
            self._drop(owner, response_id)
            shelf = self._shelves[owner]
            shelf[response_id] = stored
            shelf.num_bytes += stored.num_bytes
            self.num_bytes += stored.num_bytes
            self._by_use[owner, response_id] = None
            while len(shelf) > self._max_responses_of_owner or shelf.num_bytes > self.max_bytes_of_owner:
                self._drop(owner, next(iter(shelf)))
            while self.num_bytes > self._max_bytes:
                self._drop(*next(iter(self._by_use)))

    def get(self, owner: Hashable, response_id: str) -> StoredResponse | None:
        """The owner's response, which counts as used now; None if there is none."""
        with self._lock:
            stored = self._shelves[owner].get(response_id) if owner in self._shelves else None
            if stored is not None:
                self._shelves[owner].move_to_end(response_id)
                self._by_use.move_to_end((owner, response_id))
            return stored

    def delete(self, owner: Hashable, response_id: str) -> bool:
        """Forgets a response; returns whether there was one. Responses that continue it remain."""
        with self._lock:
            return self._drop(owner, response_id)

    def _drop(self, owner: Hashable, response_id: str) -> bool:
        if owner not in self._shelves or response_id not in (shelf := self._shelves[owner]):
            return False
        num_bytes = shelf.pop(response_id).num_bytes
        shelf.num_bytes -= num_bytes
        self.num_bytes -= num_bytes
        del self._by_use[owner, response_id]
        if not shelf:
            del self._shelves[owner]
        return True
