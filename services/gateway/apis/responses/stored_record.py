"""`ResponseRecord`: what is kept of one request to the Responses API, and of the response that it continues."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import AsyncIterator, Callable, Hashable, Mapping, Sequence
from typing import Any, TypeVar

import pydantic
from pydantic_core import to_json

from services.common.errors import InvalidRequest
from services.common.shorten import quote
from services.gateway.access.access import Caller
from services.gateway.apis.responses.event_log import EventLog
from services.gateway.apis.responses.items import Input
from services.gateway.apis.responses.response_store import ResponseStore, StoredResponse
from services.gateway.apis.responses.schema import ResponsesRequest
from services.gateway.http.json_pieces import LazyList
from services.gateway.http.json_route import parse_json
from services.gateway.resources.heavy_work import MAX_INLINE_BYTES, HeavyWork
from services.gateway.resources.memory_budget import BYTES_PER_BODY_BYTE, HeldMemory

_ITEMS = pydantic.TypeAdapter(Input)
FIELD = "previous_response_id"

T = TypeVar("T")


def owner_of(caller: Caller) -> Hashable:
    """Whose responses a client finds: those of its API key, or without keys those of its address."""
    return caller.client_id if caller.key is None else caller.name


class ResponseRecord:
    """Made for each request when responses are stored."""

    def __init__(self, store: ResponseStore, owner: Hashable, request_id: str, body: ResponsesRequest) -> None:
        """Raises `InvalidRequest` if the request continues a response that is not there."""
        self._store = store
        self._owner = owner
        self._is_stored = body.store is not False
        self._conversation: tuple[bytes, ...] = ()
        if body.previous_response_id is not None:
            previous = store.get(owner, body.previous_response_id)
            if previous is None:
                raise _no_previous(body.previous_response_id)
            self._conversation = previous.conversation
        self._own_items = _own_items(body, request_id) if self._is_stored else b""
        self._head = b""  # JSON of what does not change while the answer grows, without its end; made once
        self._kept: tuple[str, StoredResponse] | None = None

    async def after_earlier(
        self,
        make: Callable[[Sequence[Any]], T],
        max_bytes: int,
        max_values: int,
        heavy_work: HeavyWork,
        held: HeldMemory,
    ) -> T:
        """What `make` makes of the items before those of the request, of which nothing else keeps any.

        The limits are those of a body that has the whole conversation, and as much memory is held. Raises
        `InvalidRequest` and `CapacityError`.
        """
        if not self._conversation:
            return make(())
        num_bytes = sum(map(len, self._conversation)) + len(self._own_items)
        if num_bytes > max_bytes:
            raise InvalidRequest(
                f"the conversation has {num_bytes} bytes with its earlier items, gateway.max_body_bytes is {max_bytes}",
                FIELD,
            )
        async with read_conversation(self._conversation, max_values, heavy_work, held, FIELD) as items:
            try:
                earlier = _ITEMS.validate_python(items)
            except pydantic.ValidationError as error:  # an answer may have what no request may, such as a name
                reason = error.errors()[0]["msg"]
                raise InvalidRequest(f"the earlier conversation cannot be continued: {reason}", FIELD) from error
            if num_bytes > MAX_INLINE_BYTES:
                await heavy_work.turn()
            return make(earlier)

    def keep(self, head: Mapping[str, Any], rest: Mapping[str, Any]) -> None:
        """Keeps a response without log-probabilities, unless the request says not to. See `as_stored`."""
        if self._is_stored:
            self._kept = head["id"], self.as_stored(head, rest)
            self._store.put(self._owner, *self._kept)

    @property
    def kept(self) -> StoredResponse | None:
        """The response as it was kept last."""
        return None if self._kept is None else self._kept[1]

    def keep_events(self, events: EventLog) -> None:
        """Keeps all events of the response that was kept, unless it is too large with them."""
        if self._kept is not None:
            response_id, stored = self._kept
            self._store.put(self._owner, response_id, dataclasses.replace(stored, events=events))

    def running(self, head: Mapping[str, Any], rest: Mapping[str, Any]) -> StoredResponse:
        """What a client finds of a response that has not ended. Raises `InvalidRequest` if it could not be kept."""
        stored, most = self.as_stored(head, rest), self._store.max_bytes_of_owner
        if stored.num_bytes > most:
            raise InvalidRequest(
                f"the response would be stored with its conversation as {stored.num_bytes} bytes, of one client at "
                f"most {most} are (gateway.max_stored_response_bytes, max_all_stored_response_bytes)",
                "background",
            )
        return stored

    def as_stored(self, head: Mapping[str, Any], rest: Mapping[str, Any]) -> StoredResponse:
        """The response with these fields. `head`: those that do not change while the answer grows, the same each time.

        They may be large, and hundreds of responses may end at once. So their JSON is made once.
        """
        self._head = self._head or to_json(head, fallback=iter)[:-1]
        output = to_json(rest["output"], fallback=_nothing)
        others = to_json({name: each for name, each in rest.items() if name != "output"})[1:-1]
        whole = (self._head, b"," + others + b',"output":', output, b"}")
        return StoredResponse(whole, (*self._conversation, self._own_items), output, head["background"])


@contextlib.asynccontextmanager
async def read_conversation(
    lists: Sequence[bytes], max_values: int, heavy_work: HeavyWork, held: HeldMemory, param: str | None
) -> AsyncIterator[list[Any]]:
    """A context with the elements of all these JSON lists, for which `held` holds memory as for a body.

    Do not keep the elements: of large conversations one context at a time has any. `param`: the field to blame.

    Raises `InvalidRequest`, `CapacityError` and a 413.
    """
    num_bytes = sum(map(len, lists))
    await held.reserve(BYTES_PER_BODY_BYTE * num_bytes, "the stored conversation", param, "continue a shorter one")
    if num_bytes <= MAX_INLINE_BYTES:
        yield await parse_json(_joined(lists), max_values, heavy_work)
        return
    async with heavy_work.alone():
        await heavy_work.turn()
        yield await parse_json(_joined(lists), max_values, heavy_work)


def _joined(lists: Sequence[bytes]) -> bytes:
    return b"[" + b",".join(each[1:-1] for each in lists if each != b"[]") + b"]"


def _own_items(body: ResponsesRequest, request_id: str) -> bytes:
    """The request's own items as a JSON list. Each has an id, because clients page by it."""
    given = body.input
    if isinstance(given, str):
        items = [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": given}]}]
    else:
        items = [each.model_dump(exclude_none=True, by_alias=True) for each in given]
    for i, item in enumerate(items):
        item.setdefault("type", "message")
        if item["type"] == "message" and isinstance(item["content"], str):
            kind = "output_text" if item["role"] == "assistant" else "input_text"
            item["content"] = [{"type": kind, "text": item["content"]}]
        item.setdefault("id", f"in_{request_id}_{i}")
    return to_json(items)


def _nothing(_: LazyList) -> list[Any]:
    """In place of log-probabilities, which would take most of the store."""
    return []


def _no_previous(response_id: str) -> InvalidRequest:
    return InvalidRequest(
        f"there is no response {quote(response_id)} of this client to continue: it was not stored here, or has been "
        "deleted or dropped since",
        FIELD,
    )
