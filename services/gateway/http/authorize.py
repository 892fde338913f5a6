"""Checks a request's API key before its body is read, and counts the body. Anthropic's clients send `x-api-key`."""

from __future__ import annotations

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.common.errors import Unauthenticated
from services.gateway.access.access import Access
from services.gateway.access.client_address import FORWARDED_FOR
from services.gateway.http.connection import Connection
from services.gateway.http.errors import error_response
from services.gateway.http.headers import header_values
from services.gateway.resources.heavy_work import MAX_INLINE_BYTES, work_for
from services.gateway.resources.memory_budget import (
    BYTES_PER_BODY_BYTE,
    BYTES_PER_BODY_COMMA,
    HeldMemory,
    MemoryBudget,
    hold_body,
)

# Paths for probes, scrapers and browsers, which need no key. Their answers reveal nothing about requests. A POST to /
# is a request for vectors, though.
OPEN_PATHS = frozenset(
    {
        "/",
        "/favicon.ico",
        "/health",
        "/health_generate",
        "/live",
        "/load",
        "/metrics",
        "/openapi.json",
        "/ping",
        "/ready",
        "/stats",
        "/v1/health",
        "/v2",
        "/v2/health/live",
        "/v2/health/ready",
        "/version",
    }
)

_FORWARDED_FOR = FORWARDED_FOR.encode()


class Authorize:
    """An ASGI middleware. Handlers find the `Caller` as `request.state.caller`; unknown keys are refused."""

    def __init__(self, app: ASGIApp, access: Access, memory: MemoryBudget) -> None:
        self._app = app
        self._access = access
        self._memory = memory

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] not in OPEN_PATHS or (scope["path"] == "/" and scope["method"] == "POST"):
            forwarded = [each.decode("latin-1") for each in header_values(scope["headers"], _FORWARDED_FOR)]
            peer, _ = scope.get("client") or (None, None)
            address = self._access.client_addresses.find(peer, forwarded)
            try:
                caller = scope["state"]["caller"] = self._access.identify(_authorization(scope), address)
            except Unauthenticated as error:
                await error_response(error, scope)(scope, receive, send)
                return
            work_for(caller.client_id)
            connection: Connection = scope["state"]["connection"]
            held = scope["state"]["held"] = HeldMemory(self._memory, caller.client_id, connection.reads_nothing)
            hold_body(held)
            try:
                await self._app(scope, _counted(receive, held), send)
            finally:
                held.release()
            return
        await self._app(scope, receive, send)


def _counted(receive: Receive, held: HeldMemory) -> Receive:
    """`receive`, with the body counted while it arrives: what does not fit waits. Raises `CapacityError`."""

    num_before = 0  # bytes of the body

    async def receive_counted() -> Message:
        nonlocal num_before
        message = await receive()
        if body := message.get("body"):
            num_bytes = BYTES_PER_BODY_BYTE * len(body)
            if num_before >= MAX_INLINE_BYTES:
                num_bytes += BYTES_PER_BODY_COMMA * body.count(b",")
            num_before += len(body)
            try:
                await held.reserve_body(num_bytes, "its body")
            except ClientDisconnect:
                return {"type": "http.disconnect"}
        if message["type"] == "http.request" and not message.get("more_body"):
            held.end_body()
        return message

    return receive_counted


def _authorization(scope: Scope) -> str | None:
    """The value of the header `authorization`, or one made from `x-api-key`."""
    headers: dict[bytes, bytes] = dict(reversed(scope["headers"]))  # the first one counts
    key = headers.get(b"x-api-key")
    found = headers.get(b"authorization") or (None if key is None else b"Bearer " + key)
    return None if found is None else found.decode("latin-1")
