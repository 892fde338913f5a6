"""`EventLog`: the events of a response that is streamed in the background, for any number of readers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

from services.common.errors import CapacityError, InvalidRequest, NotResumable, TwostrokeError
from services.gateway.apis.shared.answer import STREAM_HEADERS, events
from services.gateway.http.connection import while_connected
from services.gateway.http.errors import describe
from services.gateway.resources.memory_budget import HeldMemory

BYTES_PER_EVENT = 100  # beside the bytes themselves


class EventLog:
    """The number of an event, from 0, is its `sequence_number`. Everything runs in the event loop.

    If memory does not have room for a further event, all are forgotten, and readers get an error; the response goes on.
    """

    def __init__(self, held: HeldMemory) -> None:
        """`held`: of the events alone, until the response has ended, and while somebody reads them."""
        self.num_bytes = 0
        self._held = held
        self._num_readers = 0
        self._events: list[bytes] = []
        self._is_ended = False
        self._lost: str | None = None  # why there are no events any more
        self._changed = asyncio.Event()  # replaced at every change

    def add(self, objects: Sequence[Any]) -> None:
        """Adds events."""
        for each in objects:
            if self._lost is not None:
                break
            event = events([each], has_names=True)
            num_bytes = BYTES_PER_EVENT + len(event)
            reason = self._held.try_add(num_bytes, "the events of a response in the background")
            if reason is not None:
                self._lost = f"the events of the response are not kept, but the response is: {reason}"
                self._events.clear()
                self._held.give_back(self.num_bytes)
                self.num_bytes = 0
            else:
                self._events.append(event)
                self.num_bytes += num_bytes
        self._notify()

    def end(self) -> None:
        """There are no further events. From now on the store counts them, until it drops them."""
        self._is_ended = True
        self._release_unread()
        self._notify()

    def check(self, starting_after: int | None) -> None:
        """Raises `NotResumable` if the events are lost, `InvalidRequest` if there is none with this number."""
        if self._lost is not None:
            raise NotResumable(self._lost)
        if starting_after is not None and not 0 <= starting_after < len(self._events):
            last = len(self._events) - 1
            raise InvalidRequest(
                f"starting_after is {starting_after}, must be a sequence_number that was sent: 0 to {last}",
                "starting_after",
            )

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Counts the events, which a slow reader keeps when the store has dropped them. Raises `CapacityError`."""
        if self._is_ended and not self._num_readers:
            reason = self._held.try_add(self.num_bytes, "the events of a response")
            if reason is not None:
                raise CapacityError(reason)
        self._num_readers += 1
        try:
            yield
        finally:
            self._num_readers -= 1
            self._release_unread()

    async def read(self, starting_after: int | None) -> AsyncIterator[bytes]:
        """The events behind one, or all; those to come, too. Raises `NotResumable` if they are lost."""
        position = 0 if starting_after is None else starting_after + 1
        while True:
            if self._lost is not None:
                raise NotResumable(self._lost)
            if position < len(self._events):
                yield self._events[position]
                position += 1
            elif self._is_ended:
                return
            else:
                await self._changed.wait()

    def _release_unread(self) -> None:
        if self._is_ended and not self._num_readers:
            self._held.release()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


class LoggedEvents(Response):
    """Sends the events of a log to one client. If it leaves, the response goes on."""

    def __init__(self, log: EventLog, starting_after: int | None = None) -> None:
        """Raises what `EventLog.check` raises."""
        super().__init__()
        log.check(starting_after)
        self._log, self._starting_after = log, starting_after

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._log.reading():
            await while_connected(scope, receive, self._send(scope["state"]["send_body"], send))

    async def _send(self, send_body: Send, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS})
        end = b""
        try:
            async for event in self._log.read(self._starting_after):
                await send_body({"type": "http.response.body", "body": event, "more_body": True})
        except TwostrokeError as error:
            end = events([describe(error)[1]])
        await send_body({"type": "http.response.body", "body": end, "more_body": False})
