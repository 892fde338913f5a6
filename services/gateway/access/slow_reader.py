"""`SlowReaders`: ends the calls of gRPC clients that do not read their streams. Runs in the gateway's event loop.

`http/protocol.py` has the same limit for HTTP and cuts the connection, which gRPC does not allow. Here the request ends
and its memory is freed, except for the message being sent; the client finds the status behind that message.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator

import grpc
import structlog

log = structlog.get_logger()


CHECKS_PER_TIMEOUT = 8


class WatchedCall:
    """One call. `sending_since` is a time on the monotonic clock while a message is being sent, else None."""

    __slots__ = ("context", "handler", "request_id", "sending_since")

    def __init__(self, context: grpc.aio.ServicerContext, request_id: str, handler: asyncio.Task[object]) -> None:
        self.context = context
        self.request_id = request_id
        self.handler = handler
        self.sending_since: float | None = None


class SlowReaders:
    """Checks all calls at regular intervals: a timer per message would cost as much as sending the message.

    Owns the tasks that report DEADLINE_EXCEEDED to slow clients.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._calls: set[WatchedCall] = set()
        self._next_check: asyncio.TimerHandle | None = None  # set while there are calls
        self._aborts: set[asyncio.Task[None]] = set()

    @contextlib.contextmanager
    def watching(self, context: grpc.aio.ServicerContext, request_id: str) -> Iterator[WatchedCall]:
        """A context in the task that handles a call, around all sending. Cancels the task after the timeout."""
        handler = asyncio.current_task()
        assert handler is not None, "a call is handled by a task"
        call = WatchedCall(context, request_id, handler)
        self._calls.add(call)
        if self._next_check is None:
            self._check_later()
        try:
            yield call
        finally:
            self._calls.discard(call)

    def _check_later(self) -> None:
        loop = asyncio.get_running_loop()
        self._next_check = loop.call_later(self._timeout_s / CHECKS_PER_TIMEOUT, self._check)

    def _check(self) -> None:
        latest = time.monotonic() - self._timeout_s
        for call in [each for each in self._calls if each.sending_since is not None and each.sending_since <= latest]:
            self._calls.discard(call)
            self._cut(call)
        self._next_check = None
        if self._calls:
            self._check_later()

    def _cut(self, call: WatchedCall) -> None:
        log.info("call cut", request_id=call.request_id, reason="does not read", timeout_s=self._timeout_s)
        abort = asyncio.ensure_future(self._abort(call.context))
        self._aborts.add(abort)
        abort.add_done_callback(self._aborts.discard)
        call.handler.cancel()

    async def _abort(self, context: grpc.aio.ServicerContext) -> None:
        """Aborts the call. Waits until the client reads the status or disconnects."""
        message = f"the stream was not read for {self._timeout_s:g} s"
        # Raised respectively when the status was sent, when the client had left before, and when it left meanwhile.
        with contextlib.suppress(grpc.aio.AbortError, grpc.aio.UsageError, grpc.aio.InternalError):
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, message)
