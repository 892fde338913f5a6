"""`Arrivals`: thousands of requests that come at once begin a few at a time, while streams and health checks go on."""

from __future__ import annotations

import asyncio
from collections import deque

from starlette.types import ASGIApp, Receive, Scope, Send

MAX_AT_ONCE = 8  # requests that begin in one iteration of the event loop; each takes 0.2 ms up to its first wait


class Arrivals:
    """The outermost ASGI middleware. Nothing is known of requests yet, so they begin in the order of their arrival."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._num_begun = 0  # in this iteration of the event loop
        self._waiting: deque[asyncio.Future[None]] = deque()  # some only while as many as may have begun

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._num_begun == MAX_AT_ONCE:
            place = asyncio.get_running_loop().create_future()
            self._waiting.append(place)
            await place
        else:
            self._note_begun()
        await self._app(scope, receive, send)

    def _note_begun(self) -> None:
        if not self._num_begun:
            asyncio.get_running_loop().call_soon(self._let_next_begin)
        self._num_begun += 1

    def _let_next_begin(self) -> None:
        self._num_begun = 0
        while self._waiting and self._num_begun < MAX_AT_ONCE:
            place = self._waiting.popleft()
            if not place.done():  # else its connection was lost
                place.set_result(None)
                self._note_begun()
