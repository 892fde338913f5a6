"""`Bodies`: reads the bodies of requests, and bounds what each of them and all together take."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.requests import Request

MAX_HELD_BYTES = 256 * 2**20  # of the bodies in one ingress that wait for their answers to begin
TIMEOUT_S = 60.0  # for a whole body, as the server's gateway.body_timeout_s


class Refused(Exception):
    """A body that is not taken, with the status of the answer and the code in it."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status, self.code = status, code


class Bodies:
    """Everything runs in one event loop."""

    def __init__(self, max_bytes: int, max_held_bytes: int = MAX_HELD_BYTES, timeout_s: float = TIMEOUT_S) -> None:
        """`max_bytes`: of one body. At least one of that size may be held."""
        self._max_bytes, self._max_held_bytes = max_bytes, max(max_bytes, max_held_bytes)
        self._timeout_s = timeout_s
        self.held_bytes = 0

    @asynccontextmanager
    async def read(self, request: Request) -> AsyncIterator[bytes]:
        """The body of a request, which counts until the end of the context.

        Raises `Refused`, without reading on, if it is too large, if there is no room for it, or if it takes too long.
        """
        pieces: list[bytes] = []
        num_bytes = 0
        stated = request.headers.get("content-length", "")
        try:
            if stated.isdecimal():
                self._check(int(stated), int(stated))
            try:
                async with asyncio.timeout(self._timeout_s):
                    async for piece in request.stream():
                        self._check(num_bytes + len(piece), len(piece))
                        pieces.append(piece)
                        num_bytes += len(piece)
                        self.held_bytes += len(piece)
            except TimeoutError as error:
                message = f"the body did not arrive within {self._timeout_s:g} s, the limit"
                raise Refused(408, "body_timeout", message) from error
            body = b"".join(pieces)
            pieces.clear()
            yield body
        finally:
            self.held_bytes -= num_bytes

    def _check(self, num_bytes: int, num_more: int) -> None:
        """`num_bytes`: of a body so far; `num_more`: that are not held yet."""
        if num_bytes > self._max_bytes:
            message = f"the body has more than {self._max_bytes} bytes, the limit (gateway.max_body_bytes)"
            raise Refused(413, "body_too_large", message)
        if self.held_bytes + num_more > self._max_held_bytes:
            message = f"requests that wait hold {self.held_bytes} bytes, {self._max_held_bytes} is the limit; try again"
            raise Refused(503, "overloaded", message)
