"""`BodyWriter`: writes pieces of a streamed body without waiting. One per answer, in the gateway's event loop."""

from __future__ import annotations

from collections.abc import Callable

from pydantic_core import to_json
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle


class BodyWriter:
    """Writes what ASGI's `send` would write, for callers that are no coroutine and cannot wait for the client."""

    __slots__ = ("_cycle", "_flow", "_write")

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle, self._flow, self._write = cycle, cycle.flow, cycle.transport.write

    def can_write(self) -> bool:
        """Whether the client reads what it is sent, in chunks; if not, only `send` knows what to do."""
        cycle = self._cycle
        return not (self._flow.write_paused or cycle.disconnected) and cycle.chunked_encoding is True

    def write(self, piece: bytes) -> None:
        """Writes a piece that is not empty as a chunk (RFC 9112, section 7.1); the answer has begun and not ended."""
        self._write(b"%x\r\n%b\r\n" % (len(piece), piece))

    def text_writer(self, before: bytes, after: bytes) -> Callable[[str], None]:
        """A function that writes a text as JSON between these bytes, as `write` does. It runs for every token."""
        write_bytes, num_bytes = self._write, len(before) + len(after)

        def write_text(text: str) -> None:
            piece = to_json(text)
            write_bytes(b"%x\r\n%b%b%b\r\n" % (num_bytes + len(piece), before, piece, after))

        return write_text
