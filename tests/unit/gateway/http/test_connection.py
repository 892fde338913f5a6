"""Work runs while its client is connected: a client that goes cancels it, and nothing else does."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from services.gateway.http.connection import while_connected

SCOPE = {"state": {"request_id": "r"}}
TIMEOUT_S = 30.0


class Client:
    """What it sends before `leaves` is set is the rest of its request."""

    def __init__(self) -> None:
        self.leaves = asyncio.Event()
        self._num_received = 0

    async def receive(self) -> dict[str, Any]:
        self._num_received += 1
        if self._num_received == 1:
            return {"type": "http.request", "body": b"", "more_body": False}
        await self.leaves.wait()
        return {"type": "http.disconnect"}


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, TIMEOUT_S))


def test_the_call_does_the_work_and_has_its_error() -> None:
    async def fail() -> None:
        raise ValueError("no")

    async def test() -> None:
        ended = list[str]()

        async def work() -> None:
            await asyncio.sleep(0.001)
            ended.append("work")

        await while_connected(SCOPE, Client().receive, work())
        assert ended == ["work"]
        with pytest.raises(ValueError, match="no"):
            await while_connected(SCOPE, Client().receive, fail())

    run(test())


def test_a_client_that_goes_cancels_the_work_and_not_what_follows() -> None:
    async def test() -> None:
        client, ended = Client(), list[str]()

        async def work() -> None:
            client.leaves.set()
            try:
                async with asyncio.timeout(TIMEOUT_S):
                    await asyncio.Event().wait()
            finally:
                await asyncio.sleep(0)  # as one that returns something
                ended.append("work")

        await while_connected(SCOPE, client.receive, work())
        assert ended == ["work"]
        await asyncio.sleep(0.001)
        task = asyncio.current_task()
        assert task is not None and not task.cancelling()

    run(test())


def test_a_client_that_goes_when_the_work_ends_changes_nothing() -> None:
    async def test() -> None:
        client, ended = Client(), list[str]()

        async def work() -> None:
            await asyncio.sleep(0.001)  # until the client is watched
            client.leaves.set()
            ended.append("work")

        await while_connected(SCOPE, client.receive, work())
        assert ended == ["work"]
        await asyncio.sleep(0.001)

    run(test())


def test_whoever_cancels_the_call_cancels_the_work() -> None:
    async def test() -> None:
        has_begun, ended = asyncio.Event(), list[str]()

        async def work() -> None:
            has_begun.set()
            try:
                await asyncio.Event().wait()
            finally:
                ended.append("work")

        call = asyncio.create_task(while_connected(SCOPE, Client().receive, work()))
        await has_begun.wait()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert ended == ["work"] and call.cancelled()

    run(test())
