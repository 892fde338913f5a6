"""uvicorn's HTTP/1.1 protocol with limits, so that slow, silent or endless clients cannot hold memory or connections.

uvicorn has no such limits when it parses with httptools. There is one object per connection, in the gateway's event
loop.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from itertools import chain
from typing import Any, ClassVar

import structlog
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from services.common.config import GatewaySection
from services.common.fairness import may_wait, refusal
from services.gateway.access.client_address import ClientAddresses
from services.gateway.http.connection import BodyWriter, Connection, Hangups
from services.gateway.http.cross_origin import answer_headers
from services.gateway.http.errors import error_body
from services.gateway.http.headers import REQUEST_ID_HEADER, new_request_id

log = structlog.get_logger()

MAX_HEADERS = 256  # of one request, trailers included: each takes a microsecond or two before anybody may wait
MAX_PIECE_BYTES = 2048  # of headers and chunks, at once: in chunks of a byte it takes a tenth of a millisecond
MAX_WRITTEN_BYTES = 2**16  # of a body, at once
SLICE_S = 0.000_2  # of processor time: for how long a connection's pieces are parsed in one iteration of the event loop
MIN_SECOND_LOOK_S = 0.1  # extra time after a deadline, in which the loop reads what has already arrived


class TooManyHeadersError(Exception):
    """Within the parser, after the client has been told."""


class _Flow(FlowControl):
    """Knows for how long nothing has been read, because the application has not taken what came before."""

    def __init__(self, transport: asyncio.Transport, clock: Callable[[], float]) -> None:
        super().__init__(transport)
        self._clock = clock
        self._paused_s, self._paused_at = 0.0, 0.0
        self.is_late = False  # whether what has been read is not all parsed: until then nothing more is read

    def pause_reading(self) -> None:
        if not self.read_paused:
            self._paused_at = self._clock()
        super().pause_reading()

    def resume_reading(self) -> None:
        if self.read_paused:
            self._paused_s += self._clock() - self._paused_at
        if self.is_late:
            self.read_paused = False
        else:
            super().resume_reading()

    def take_paused_s(self) -> float:
        """For how long since the last call."""
        now, paused_s = self._clock(), self._paused_s
        if self.read_paused:
            paused_s, self._paused_at = paused_s + now - self._paused_at, now
        self._paused_s = 0.0
        return paused_s


class BoundedProtocol(HttpToolsProtocol):
    """Enforces the limits of its section. A subclass sets these values, because uvicorn creates the objects."""

    section: GatewaySection
    announce: Callable[[], None] = staticmethod(lambda: None)  # a request with a body has begun to arrive
    hangups: Hangups
    addresses: ClientAddresses
    num_of: ClassVar[Counter[str]]  # open connections of each client

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._num_header_bytes = 0  # of the request whose headers are arriving
        self._num_headers = 0  # of this request, and its trailers
        self._is_in_headers = True  # whether headers, or nothing yet, have arrived
        self._num_frame_bytes = 0  # since the last bytes of the body: chunk sizes, chunk extensions and trailers
        self._num_body_left = 0  # bytes of the arriving body that are still to come, if it does not come in chunks
        self._rest = bytearray()  # what has been received and not parsed yet
        self._is_refused = False  # whether an error has been sent that ends the connection
        self._running: RequestResponseCycle | None = None  # the request whose answer began last
        self._peer: str | None = None  # the client; None if nobody knows
        self._read_deadline: asyncio.TimerHandle | None = None
        self._write_deadline: asyncio.TimerHandle | None = None

    @property
    def is_new(self) -> bool:
        """Whether no request has come yet, or not all of its headers."""
        return self.cycle is None and not self._is_refused

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow: _Flow = _Flow(transport, self.loop.time)
        self._connection = Connection(transport, self.hangups)
        self._peer = self.addresses.of_connection(self.client[0] if self.client else None)
        reason = self._why_one_too_many()
        if self._peer is not None:
            self.num_of[self._peer] += 1
        if reason is not None:
            self._refuse(503, reason, "too_many_connections")
            return
        self._limit_reading(self.section.header_timeout_s)

    def connection_lost(self, exc: Exception | None) -> None:
        self._clear_read_deadline()
        self._clear_write_deadline()
        self._rest.clear()
        if self._peer is not None:
            self.num_of[self._peer] -= 1
            if not self.num_of[self._peer]:
                del self.num_of[self._peer]
        super().connection_lost(exc)
        # uvicorn tells only the request that arrived last, but that one waits while an earlier one is answered.
        if self._running is not None and not self._running.response_complete:
            self._running.disconnected = True
            self._running.message_event.set()
        self._connection.note_lost()

    def _why_one_too_many(self) -> str | None:
        """Why there is no room for this connection, which is not counted yet; None if there is. The last part of the
        room is kept for clients with few.
        """
        most, num_others = self.section.max_connections, len(self.connections) - 1
        if num_others >= most:
            return f"there are {most} connections, the limit (gateway.max_connections)"
        if self._peer is None:
            return None
        num_own = self.num_of[self._peer]
        if may_wait(most, num_others, num_own, 1):
            return None
        held = f"{num_own} of {num_others} connections (gateway.max_connections)"
        return f"{refusal(held, 1, most)}; a proxy with many clients belongs into gateway.trusted_proxies"

    def data_received(self, data: bytes) -> None:
        if self._rest:  # the next iteration of the event loop goes on with it
            self._rest += data
        elif len(data) > MAX_PIECE_BYTES:
            self._rest += data
            self._parse_some()
        else:
            self._parse(data)

    def _parse_some(self) -> None:
        """Parses a part of what has come: hundreds of connections may send thousands of chunks or requests each.

        Stops behind a request that waits for an earlier one of its connection: as objects they take a hundred times as
        much memory as they have bytes, and each full collection of Python's garbage looks at all of them.
        """
        end = time.thread_time() + SLICE_S
        while self._rest and not self.pipeline:
            # A body without chunks is not parsed, but what follows it is.
            num_bytes = MAX_PIECE_BYTES if self._is_in_headers else max(MAX_PIECE_BYTES, self._num_body_left)
            piece = bytes(self._rest[:num_bytes])
            del self._rest[:num_bytes]
            self._parse(piece)
            if time.thread_time() >= end:
                break
        if self.transport.is_closing():
            self._rest.clear()
        elif self._rest:
            self.flow.is_late = True
            self.transport.pause_reading()
            if self.pipeline:
                self._clear_read_deadline()  # what has come of the next request does not wait for its client
            else:
                self.loop.call_soon(self._parse_some)
        elif self.flow.is_late:
            self.flow.is_late = False
            if not self.flow.read_paused:
                self.transport.resume_reading()

    def _parse(self, data: bytes) -> None:
        if self._is_refused:
            return
        if self._is_in_headers:
            if self._read_deadline is None:
                self._limit_reading(self.section.header_timeout_s)
            self._num_header_bytes += len(data)
        else:
            if self._read_deadline is None:
                self._limit_reading(self.section.body_timeout_s)
            self._num_frame_bytes += len(data)  # `on_body` resets it
        super().data_received(data)
        if not self._is_in_headers and self._read_deadline is None and not self._is_refused:
            self._limit_reading(self.section.body_timeout_s)
        # While the headers are incomplete, everything received belongs to them.
        if self._is_in_headers and self._num_header_bytes > self.section.max_header_bytes:
            self._refuse_headers()
        elif not self._is_in_headers and self._num_frame_bytes > self.section.max_header_bytes:
            limit = self.section.max_header_bytes
            self._refuse(431, f"the frame of the body has more than {limit} bytes, the limit", "headers_too_large")

    def on_header(self, name: bytes, value: bytes) -> None:
        self._num_headers += 1
        if self._num_headers > MAX_HEADERS:
            self._refuse(431, f"the request has more than {MAX_HEADERS} headers, the limit", "headers_too_large")
            raise TooManyHeadersError  # ends the parser, which then reports it
        if self._is_in_headers:  # trailers after the body have no effect, so they are not kept
            name = name.lower()
            if name == b"expect":
                super().on_header(name, value)
                return
            if name == b"content-length" and value.isdigit():
                self._num_body_left = int(value)
            self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        num_bytes = len(self.url) + sum(map(len, chain.from_iterable(self.headers))) + 4 * len(self.headers)
        if num_bytes > self.section.max_header_bytes:
            self._refuse_headers()
        if self._is_refused:
            return
        if self.parser.get_method() == b"POST":
            self.announce()
        super().on_headers_complete()
        self._is_in_headers, self._num_frame_bytes = False, 0
        self.flow.take_paused_s()
        self._clear_read_deadline()  # a body that has not come with them has a limit of its own, see `_parse`

    def on_body(self, body: bytes) -> None:
        self._num_frame_bytes = 0
        self._num_body_left = max(0, self._num_body_left - len(body))
        if not self._is_refused:
            super().on_body(body)

    def on_message_complete(self) -> None:
        if self._is_refused:
            return
        self._clear_read_deadline()
        self._is_in_headers, self._num_header_bytes, self._num_headers = True, 0, 0
        self._num_body_left = 0
        super().on_message_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._write_deadline is None:
            timeout_s = self.section.slow_reader_timeout_s
            self._write_deadline = self.loop.call_later(timeout_s, self._cut, "does not read", timeout_s)

    def resume_writing(self) -> None:
        super().resume_writing()
        if not self.transport.is_closing():
            self._clear_write_deadline()

    def on_response_complete(self) -> None:
        has_waited = bool(self.pipeline)
        super().on_response_complete()
        if self._rest and has_waited and not self.pipeline:
            self.loop.call_soon(self._parse_some)
        if self.transport.is_closing():  # that was the last answer of this connection
            self._close()

    def timeout_keep_alive_handler(self) -> None:
        """Closes a connection that was idle too long after an answer, without a message (RFC 9112, section 9.5).

        It does not wait for a peer that does not read the end of its answer.
        """
        self.timeout_keep_alive_task = self.loop.call_later(MIN_SECOND_LOOK_S, self._close)

    def send_400_response(self, msg: str) -> None:
        """Refuses data that is not HTTP."""
        self._refuse(400, "this is not a valid HTTP request", "invalid_http")

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        cycle.scope["state"]["body_writer"] = BodyWriter(cycle)
        cycle.scope["state"]["connection"] = self._connection
        if cycle.scope["http_version"] == "1.0":
            app = _WithoutChunks(app, cycle)
        super()._start_asgi_task(cycle, _InPieces(app))

    def _refuse_headers(self) -> None:
        limit = self.section.max_header_bytes
        self._refuse(431, f"the headers have more than {limit} bytes, the limit", "headers_too_large")

    def _refuse(self, status: int, message: str, code: str) -> None:
        """Sends an error, unless another answer has begun, and closes the connection."""
        if self._is_refused:
            return
        self._is_refused = True
        self._clear_read_deadline()
        if self._may_answer():
            body = error_body(message, status=status, code=code)
            headers = {
                "content-type": "application/json",
                "connection": "close",
                REQUEST_ID_HEADER: new_request_id(),
                "content-length": str(len(body)),
                **answer_headers(self.headers or (), self.section.cors_origins),
            }
            lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
            self.transport.write(STATUS_LINE[status] + lines.encode("latin-1") + b"\r\n" + body)
        self._close()

    def _may_answer(self) -> bool:
        """Whether the client would take an answer written now as the answer to the arriving request."""
        if self._is_in_headers:
            return self.cycle is None or self.cycle.response_complete
        return not self.cycle.response_started and not self.pipeline

    def _limit_reading(self, timeout_s: float) -> None:
        self._clear_read_deadline()
        due_at = self.loop.time() + timeout_s
        self._read_deadline = self.loop.call_later(timeout_s, self._look_again, timeout_s, due_at)

    def _look_again(self, timeout_s: float, due_at: float) -> None:
        """The deadline has passed, but a busy event loop may not have read yet what the client sent in time. The
        client gets as much extra time as the loop was late. While a body waited for memory nothing was read: that time
        does not count.

        Each iteration of the loop runs timers before reads, so the loop reads at least once more.
        """
        late_s = self.loop.time() - due_at
        paused_s = 0.0 if self._is_in_headers or self.pipeline else self.flow.take_paused_s()
        if paused_s:
            more_s = max(paused_s, MIN_SECOND_LOOK_S)
            due_at = self.loop.time() + more_s
            self._read_deadline = self.loop.call_later(more_s, self._look_again, timeout_s, due_at)
            return
        self._read_deadline = self.loop.call_later(max(late_s, MIN_SECOND_LOOK_S), self._time_out, timeout_s)

    def _time_out(self, timeout_s: float) -> None:
        log.info("connection cut", client=self.client, reason="sends nothing or too slowly", timeout_s=timeout_s)
        part, key = ("headers", "header_timeout_s") if self._is_in_headers else ("body", "body_timeout_s")
        self._refuse(
            408,
            f"the {part} of the request did not come within {timeout_s:g} s, the limit (gateway.{key})",
            "request_timeout",
        )

    def _clear_read_deadline(self) -> None:
        if self._read_deadline is not None:
            self._read_deadline.cancel()
            self._read_deadline = None

    def _clear_write_deadline(self) -> None:
        if self._write_deadline is not None:
            self._write_deadline.cancel()
            self._write_deadline = None

    def _close(self) -> None:
        """Sends the rest of the buffer, within a time limit, and closes the connection."""
        self.transport.close()
        if self._write_deadline is None and self.transport.get_write_buffer_size() > 0:
            timeout_s = self.section.slow_reader_timeout_s
            self._write_deadline = self.loop.call_later(timeout_s, self._cut, "does not read", timeout_s)

    def _cut(self, reason: str, timeout_s: float) -> None:
        log.info("connection cut", client=self.client, reason=reason, timeout_s=timeout_s)
        self.transport.abort()


class _InPieces:
    """Around the application: sends a large body piece by piece, each when the client has read most of the last one.

    As a whole it would lie in the buffer of its connection, where nothing counts it: the application would have ended,
    and given back the memory that it holds, before its client has read anything.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_pieces(message: Message) -> None:
            if len(rest := message.get("body", b"")) > MAX_WRITTEN_BYTES:
                rest = memoryview(rest)
                while len(rest) > MAX_WRITTEN_BYTES:
                    await send({**message, "body": rest[:MAX_WRITTEN_BYTES], "more_body": True})
                    rest = rest[MAX_WRITTEN_BYTES:]
                message = {**message, "body": rest}
            await send(message)

        await self._app(scope, receive, send_pieces)


class _WithoutChunks:
    """Around the application, for one request of HTTP/1.0, which knows no chunks (RFC 9112, section 7.1).

    The end of the connection ends a body without content-length; uvicorn closes it after each such request.
    """

    def __init__(self, app: ASGIApp, cycle: RequestResponseCycle) -> None:
        self._app, self._cycle = app, cycle

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        cycle, has_length = self._cycle, False

        async def send_plain(message: Message) -> None:
            nonlocal has_length
            if message["type"] == "http.response.start":
                has_length = any(name.lower() == b"content-length" for name, _ in message.get("headers", ()))
                if not has_length:
                    cycle.chunked_encoding = False
            elif not has_length:
                cycle.expected_content_length = len(message.get("body", b""))  # uvicorn compares them
            await send(message)

        await self._app(scope, receive, send_plain)
