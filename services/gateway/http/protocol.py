"""uvicorn's HTTP/1.1 protocol, bounded: no client holds memory or a connection by being slow, silent or endless.

uvicorn limits none of this when it parses with httptools. One object a connection, in the gateway's event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import structlog
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from services.gateway.http.cross_origin import answer_headers
from services.gateway.http.errors import error_body
from services.gateway.http.request_id import REQUEST_ID_HEADER, new_request_id

log = structlog.get_logger()

MIN_SECOND_LOOK_S = 0.1  # for a client out of time: the loop reads once more what has come meanwhile


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """What one connection may do, and how many there may be."""

    max_connections: int
    max_header_bytes: int  # of one request: its first line and all its headers
    header_timeout_s: float  # from connecting, or the first byte of a further request, to the end of its headers
    body_timeout_s: float  # from there to the end of the body
    slow_reader_timeout_s: float  # how long a full write buffer may stay full


class BoundedProtocol(HttpToolsProtocol):
    """See `ConnectionLimits`; `limits` and `cors_origins` are set on a subclass, because uvicorn makes the objects."""

    limits: ConnectionLimits
    cors_origins: Collection[str] = ()

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._num_header_bytes = 0  # of the request whose headers are coming in
        self._is_in_headers = True  # or before them
        self._num_frame_bytes = 0  # since the last bytes of a body: of chunks' sizes and extensions, and trailers
        self._is_refused = False  # an answer is out that ends the connection
        self._read_deadline: asyncio.TimerHandle | None = None
        self._write_deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.limits.max_connections:
            self._refuse(503, f"there are {self.limits.max_connections} connections, the limit", "too_many_connections")
            return
        self._limit_reading(self.limits.header_timeout_s)

    def connection_lost(self, exc: Exception | None) -> None:
        self._clear_read_deadline()
        self._clear_write_deadline()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            return
        if self._is_in_headers:
            if self._read_deadline is None:
                self._limit_reading(self.limits.header_timeout_s)
            self._num_header_bytes += len(data)
        else:
            self._num_frame_bytes += len(data)  # until `on_body` finds otherwise
        super().data_received(data)
        # What came with it beyond the headers is not counted, or it would not be in the headers any more.
        if self._is_in_headers and self._num_header_bytes > self.limits.max_header_bytes:
            self._refuse_headers()
        elif not self._is_in_headers and self._num_frame_bytes > self.limits.max_header_bytes:
            limit = self.limits.max_header_bytes
            self._refuse(431, f"the frame of the body has more than {limit} bytes, the limit", "headers_too_large")

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._is_in_headers:  # what follows a body changes nothing, so it is not kept
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        num_bytes = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if num_bytes > self.limits.max_header_bytes:
            self._refuse_headers()
        if self._is_refused:
            return
        super().on_headers_complete()
        self._is_in_headers, self._num_frame_bytes = False, 0
        self._limit_reading(self.limits.body_timeout_s)

    def on_body(self, body: bytes) -> None:
        self._num_frame_bytes = 0
        if not self._is_refused:
            super().on_body(body)

    def on_message_complete(self) -> None:
        if self._is_refused:
            return
        self._clear_read_deadline()
        self._is_in_headers, self._num_header_bytes = True, 0
        super().on_message_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._write_deadline is None:
            timeout_s = self.limits.slow_reader_timeout_s
            self._write_deadline = self.loop.call_later(timeout_s, self._cut, "does not read", timeout_s)

    def resume_writing(self) -> None:
        super().resume_writing()
        if not self.transport.is_closing():
            self._clear_write_deadline()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing():  # it was the last answer of this connection
            self._close()

    def timeout_keep_alive_handler(self) -> None:
        """Idle for too long after an answer, which ends a connection without a word (RFC 9112, section 9.5).

        A peer that does not take the end of its answer is not waited for.
        """
        self.timeout_keep_alive_task = self.loop.call_later(MIN_SECOND_LOOK_S, self._close)

    def send_400_response(self, msg: str) -> None:
        """Not HTTP."""
        self._refuse(400, "this is not a valid HTTP request", "invalid_http")

    def _refuse_headers(self) -> None:
        limit = self.limits.max_header_bytes
        self._refuse(431, f"the headers have more than {limit} bytes, the limit", "headers_too_large")

    def _refuse(self, status: int, message: str, code: str) -> None:
        """Answers, unless an answer is under way, and closes."""
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
                **answer_headers(self.headers or (), self.cors_origins),
            }
            lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
            self.transport.write(STATUS_LINE[status] + lines.encode("latin-1") + b"\r\n" + body)
        self._close()

    def _may_answer(self) -> bool:
        """Whether what we write now would be taken for the answer to the request that comes in."""
        if self._is_in_headers:
            return self.cycle is None or self.cycle.response_complete
        return not self.cycle.response_started and not self.pipeline

    def _limit_reading(self, timeout_s: float) -> None:
        self._clear_read_deadline()
        due_at = self.loop.time() + timeout_s
        self._read_deadline = self.loop.call_later(timeout_s, self._look_again, timeout_s, due_at)

    def _look_again(self, timeout_s: float, due_at: float) -> None:
        """Time is up, but a loop that was busy may not have read what the client sent: it gets as long as it was late.

        Timers come before reading in a turn of the loop, so at least one reading lies between.
        """
        late_s = self.loop.time() - due_at
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
        """Sends what is left, but not for ever."""
        self.transport.close()
        if self._write_deadline is None and self.transport.get_write_buffer_size() > 0:
            timeout_s = self.limits.slow_reader_timeout_s
            self._write_deadline = self.loop.call_later(timeout_s, self._cut, "does not read", timeout_s)

    def _cut(self, reason: str, timeout_s: float) -> None:
        log.info("connection cut", client=self.client, reason=reason, timeout_s=timeout_s)
        self.transport.abort()
