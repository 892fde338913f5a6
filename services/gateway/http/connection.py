"""Cancels work when its client disconnects, so that no step runs for a request that nobody waits for."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.types import Receive

T = TypeVar("T")


class ClientGone(Exception):
    """The client has closed the connection."""


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`. If the client disconnects first, cancels `work` and raises `ClientGone`."""
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
        return await work
    except asyncio.CancelledError:
        if has_gone and not task.uncancel():
            raise ClientGone from None
        raise
    finally:
        is_over = True
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)


async def _wait_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
