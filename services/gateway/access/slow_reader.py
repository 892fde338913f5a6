"""`SlowReaders`: a gRPC client that does not read its stream loses it. In the gateway's event loop.

HTTP has the same bound in `http/protocol.py`, which cuts the connection. gRPC has no way to do so: here the request
ends and its memory is given back but for the one message under way, behind which the client will find the status.
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
    """One call; `sending_since`, on the monotonic clock, while a message is being sent."""

    __slots__ = ("context", "handler", "request_id", "sending_since")

    def __init__(self, context: grpc.aio.ServicerContext, request_id: str, handler: asyncio.Task[object]) -> None:
        self.context = context
        self.request_id = request_id
        self.handler = handler
        self.sending_since: float | None = None


class SlowReaders:
    """Looks at all calls every so often: a timer for each message would cost as much as to send it.

    Owns what still tells clients that they were too slow.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._calls: set[WatchedCall] = set()
        self._next_check: asyncio.TimerHandle | None = None  # while there are calls
        self._tellers: set[asyncio.Task[None]] = set()

    @contextlib.contextmanager
    def watching(self, context: grpc.aio.ServicerContext, request_id: str) -> Iterator[WatchedCall]:
        """Around all sending of one call, in the task that handles it: that is cancelled after the timeout."""
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
        teller = asyncio.ensure_future(self._tell(call.context))
        self._tellers.add(teller)
        teller.add_done_callback(self._tellers.discard)
        call.handler.cancel()

    async def _tell(self, context: grpc.aio.ServicerContext) -> None:
        """Until the client reads it, or goes."""
        message = f"the stream was not read for {self._timeout_s:g} s"
        # Respectively: told; had gone before; went meanwhile.
        with contextlib.suppress(grpc.aio.AbortError, grpc.aio.UsageError, grpc.aio.InternalError):
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, message)
