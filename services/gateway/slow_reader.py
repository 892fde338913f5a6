"""`SlowReaders`: a gRPC client that does not read its stream loses it. In the gateway's event loop.

HTTP has the same bound in `http/protocol.py`, which cuts the connection. gRPC has no way to do so: here the request
ends and its memory is given back but for the one message under way, behind which the client will find the status.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

import grpc
import structlog

log = structlog.get_logger()


class SlowReaders:
    """Owns what still tells clients that they were too slow."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._tellers: set[asyncio.Task[None]] = set()

    @contextlib.contextmanager
    def cut_unless_sent(self, context: grpc.aio.ServicerContext, request_id: str) -> Iterator[None]:
        """Around the sending of one message, in the task that handles the call: it is cancelled after the timeout."""
        handler = asyncio.current_task()
        assert handler is not None, "a call is handled by a task"

        def cut() -> None:
            log.info("call cut", request_id=request_id, reason="does not read", timeout_s=self._timeout_s)
            teller = asyncio.ensure_future(self._tell(context))
            self._tellers.add(teller)
            teller.add_done_callback(self._tellers.discard)
            handler.cancel()

        deadline = asyncio.get_running_loop().call_later(self._timeout_s, cut)
        try:
            yield
        finally:
            deadline.cancel()

    async def _tell(self, context: grpc.aio.ServicerContext) -> None:
        """Until the client reads it, or goes."""
        message = f"the stream was not read for {self._timeout_s:g} s"
        with contextlib.suppress(grpc.aio.AbortError, grpc.aio.UsageError):
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, message)
