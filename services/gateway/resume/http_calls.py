"""`HttpResumption`: requests over HTTP with the header Idempotency-Key (draft-ietf-httpapi-idempotency-key-header).

The application runs such a request in a task of its own, as if its client never left. What it sends is recorded: the
events of a stream, each with an id, or the pieces of another body. A client that comes back sends the same POST again;
of a stream with Last-Event-ID (HTML standard, "Server-sent events") it gets what follows that event.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import re

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.common.errors import InvalidRequest, TwostrokeError
from services.common.shorten import quote
from services.gateway.http.connection import while_connected
from services.gateway.http.errors import describe, dialect_of, error_response
from services.gateway.http.headers import header_values
from services.gateway.http.json_pieces import json_line
from services.gateway.resources.memory_budget import HeldMemory, hold_body
from services.gateway.resume.recording import AnswerReader, Received, Recording
from services.gateway.resume.resumption import Call, Resumption

KIND = "http"
PATHS = frozenset(
    {
        "/chat/completions",
        "/cohere/v2/chat",
        "/completion",
        "/completions",
        "/generate",
        "/generate_stream",
        "/infill",
        "/inference/v1/generate",
        "/invocations",
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/messages",
        "/responses",
        "/v1/responses",
        "/v2/chat",
        "/vertex_generate",
    }
)
# Of Triton's protocol, whose requests have an id of their own, and Ollama's, whose streams are no events; other routes
# do no work that is worth keeping.
REFUSED = re.compile(r"/v2/models/.*/(infer|generate|generate_stream)|/api/(chat|generate)")
KEY_HEADER, LAST_EVENT_HEADER = b"idempotency-key", b"last-event-id"
MAX_KEY_CHARACTERS = 255
END_OF_EVENT = b"\n\n"
_KEY = re.compile(rb"[\x21-\x7e]{1,%d}" % MAX_KEY_CHARACTERS)
_EVENT_ID = re.compile(rb"([1-9][0-9]{0,8})-([0-9a-f]{8})")  # number and digest, as events have them


class HttpResumption:
    """An ASGI middleware within `Authorize`: it needs the caller."""

    def __init__(self, app: ASGIApp, resumption: Resumption) -> None:
        self._app = app
        self._resumption = resumption

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_meant = scope["method"] == "POST" and _is_resumable(scope)
        if not is_meant or (scope["path"] not in PATHS and not REFUSED.fullmatch(scope["path"])):
            await self._app(scope, receive, send)
            return
        try:
            if scope["path"] not in PATHS:
                raise InvalidRequest(f"requests to {quote(scope['path'])} cannot be resumed", "Idempotency-Key")
            key, received = _read_key(scope), _read_last_event(scope)
            body = await _read_body(receive)
            if body is not None:
                await while_connected(scope, receive, self._answer(scope, send, key, body, received))
        except (TwostrokeError, HTTPException) as error:
            await error_response(error, scope)(scope, receive, send)

    async def _answer(self, scope: Scope, send: Send, key: str, body: bytes, received: Received | None) -> None:
        """Raises only errors that come before the status line, or in the middle of a body that is no stream."""

        async def produce(recording: Recording) -> None:
            await self._run(scope, body, recording)

        state = scope["state"]
        name = (state["caller"].owner, KIND, key)
        call = Call(name, _fingerprint(scope, body), received, produce, state["held"], state["request_id"])
        reader = await self._resumption.read(call)
        try:
            beginning = await reader.begin()
            head = json.loads(beginning.head)
            if received is not None and beginning.is_at_end:
                head = {"status": 204, "headers": []}  # tells a browser not to come again
            await send({"type": "http.response.start", "status": head["status"], "headers": _decode(head["headers"])})
            await self._send_items(scope, send, reader, is_stream=beginning.is_stream)
        finally:
            reader.close()

    async def _send_items(self, scope: Scope, send: Send, reader: AnswerReader, *, is_stream: bool) -> None:
        end = b""
        try:
            while (item := await reader.next()) is not None:
                await send({"type": "http.response.body", "body": item, "more_body": True})
        except TwostrokeError as error:
            if not is_stream:
                raise  # the body stays incomplete, and the connection is closed
            end = _failure(error, scope)
        await send({"type": "http.response.body", "body": end, "more_body": False})

    async def _run(self, scope: Scope, body: bytes, recording: Recording) -> None:
        """Has the application answer the request, whoever reads the answer."""
        sink = _Sink(recording)
        # What it changes in the state is of this run alone; only the connection may end before it.
        of_connection: HeldMemory = scope["state"]["held"]
        held = HeldMemory(of_connection.budget, of_connection.client)  # its waits outlast the connection, too
        hold_body(held)
        state = {
            **scope["state"],
            "held": held,
            "request_id": recording.record.run.request_id,
            "send_body": sink.send,
            "body_writer": None,  # everything goes into the recording
        }
        try:
            await self._app({**scope, "state": state}, _Body(body).receive, sink.send)
        finally:
            held.release()
        await sink.close()


class _Body:
    """A request whose client never leaves."""

    def __init__(self, body: bytes) -> None:
        self._body: bytes | None = body

    async def receive(self) -> Message:
        body, self._body = self._body, None
        if body is None:
            await asyncio.Event().wait()  # until the request is cancelled
        return {"type": "http.request", "body": body, "more_body": False}


class _Sink:
    """Records an answer. Splits a stream into its events, and gives each an id: its number and digest."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._is_stream = False
        self._rest = b""  # of a stream: the beginning of an event

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._begin(message)
            return
        body = message.get("body", b"")
        if not self._is_stream:
            if body:
                await self._recording.add(body)
            return
        *whole, self._rest = (self._rest + body).split(END_OF_EVENT)
        for event in whole:
            number, run = self._recording.num_items + 1, self._recording.record.run
            # An error has no id: it does not come again when the request runs again.
            line = b"" if run.has_failed else b"id: %d-%08x\n" % (number, run.digest)
            await self._recording.add(line + event + END_OF_EVENT)

    async def close(self) -> None:
        """Called at the end of the answer."""
        assert not self._rest, "a stream consists of whole events"

    def _begin(self, message: Message) -> None:
        status, headers = message["status"], message.get("headers", [])
        content_type = dict(headers).get(b"content-type", b"")
        self._is_stream = content_type.startswith(b"text/event-stream")
        pairs = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in headers]
        head = {"status": status, "headers": pairs}
        self._recording.begin(json.dumps(head).encode(), is_stream=self._is_stream, is_error=status >= 400)


def _is_resumable(scope: Scope) -> bool:
    return any(header_values(scope["headers"], each) for each in (KEY_HEADER, LAST_EVENT_HEADER))


def _read_key(scope: Scope) -> str:
    keys = header_values(scope["headers"], KEY_HEADER)
    if len(keys) != 1:
        need = "Last-Event-ID needs it" if not keys else "must be given once"
        raise InvalidRequest(f"Idempotency-Key is given {len(keys)} times: {need}", "Idempotency-Key")
    if not _KEY.fullmatch(keys[0]):
        raise InvalidRequest(
            f"Idempotency-Key has {len(keys[0])} bytes, must be 1 to {MAX_KEY_CHARACTERS} printable ASCII characters "
            "without spaces",
            "Idempotency-Key",
        )
    return keys[0].decode()


def _read_last_event(scope: Scope) -> Received | None:
    """What the client has, by the id of its last event; None if it has nothing."""
    given = header_values(scope["headers"], LAST_EVENT_HEADER)
    if not given:
        return None
    match = _EVENT_ID.fullmatch(given[-1])
    if match is None:
        raise InvalidRequest(
            f"Last-Event-ID is {quote(given[-1].decode('latin-1'))}, must be the id of an event of this stream, such "
            "as 12-0123abcd",
            "Last-Event-ID",
        )
    return Received(int(match[1]), int(match[2], 16))


async def _read_body(receive: Receive) -> bytes | None:
    """The whole body; None if the client leaves before its end."""
    pieces = []
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return None
        pieces.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(pieces)


def _fingerprint(scope: Scope, body: bytes) -> bytes:
    line = f"{scope['path']}?".encode() + scope["query_string"] + b"\n"
    return hashlib.sha256(line + body).digest()


def _decode(headers: list[list[str]]) -> list[tuple[bytes, bytes]]:
    return [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers]


def _failure(error: TwostrokeError, scope: Scope) -> bytes:
    """The event that ends a stream with an error. It has no id, so the client can still resume behind the others."""
    dialect = dialect_of(scope)
    body = describe(error)[1] if dialect is None else dialect.write_error(error, scope)
    name = f"event: {body['type']}\n" if "type" in body else ""
    return name.encode() + b"data: " + json_line(body) + END_OF_EVENT
