"""Cancels work when its client disconnects, so that no step runs for a request that nobody waits for."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import structlog
from starlette.types import Receive, Scope

log = structlog.get_logger()


async def while_connected(scope: Scope, receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Does the work of answering a request. If the client disconnects first, cancels it and returns."""
    task, is_over, has_gone = asyncio.current_task(), False, False
    assert task is not None, "a coroutine runs in a task"

    def cancel_work(_: asyncio.Task[None]) -> None:
        nonlocal has_gone
        if not is_over:
            has_gone = True
            task.cancel()

    watching = asyncio.create_task(_wait_disconnect(receive))
    watching.add_done_callback(cancel_work)
    try:
        await work
    except asyncio.CancelledError:
        if not has_gone or task.uncancel():
            raise
        log.debug("client is gone", request_id=scope["state"]["request_id"])
    finally:
        is_over = True
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)


async def _wait_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
