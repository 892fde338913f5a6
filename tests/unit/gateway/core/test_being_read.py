"""Requests that are still being read are aborted, also again while they end."""

from __future__ import annotations

import asyncio

import pytest

from services.common.errors import AbortedByCaller
from services.gateway.core.request_service import BeingRead

ANN, BOB = ("ann", 0), ("bob", 0)


@pytest.mark.parametrize("again", ["its name", "all"])
def test_a_request_that_is_ending_already_is_found_and_stops_nobody(again: str) -> None:
    async def test() -> None:
        being_read, may_end = BeingRead(), asyncio.Event()
        ending = asyncio.Event()

        async def read(name: str) -> None:
            async with being_read.until_started(ANN, [name]):
                try:
                    await asyncio.Event().wait()
                finally:
                    ending.set()
                    await may_end.wait()  # such as a picture's process that must be told

        tasks = [asyncio.create_task(read("a")), asyncio.create_task(read("b"))]
        await asyncio.sleep(0)
        assert being_read.abort(ANN, lambda name: name == "a")
        await ending.wait()
        try:
            assert not being_read.abort(BOB, lambda _: True)
            assert being_read.abort(ANN, lambda name: again == "all" or name == "a")
        finally:
            may_end.set()
        with pytest.raises(AbortedByCaller):
            await tasks[0]
        if again != "all":
            await asyncio.sleep(0)
            assert not tasks[1].done()
            assert being_read.abort(ANN, lambda _: True)
        with pytest.raises(AbortedByCaller):
            await tasks[1]
        assert not being_read.abort(ANN, lambda _: True)

    asyncio.run(asyncio.wait_for(test(), 30))


def test_several_end_together_when_each_has_been_aborted() -> None:
    async def test() -> None:
        being_read, found = BeingRead(), list[frozenset[str]]()

        async def read() -> None:
            async with being_read.until_started(ANN, ["x-0", "x-1", "x-2"]) as aborted:
                try:
                    await asyncio.Event().wait()
                finally:
                    found.append(frozenset(aborted))

        task = asyncio.create_task(read())
        await asyncio.sleep(0)
        for name in ("x-0", "x-2", "x-0"):
            assert being_read.abort(ANN, name.__eq__)
            await asyncio.sleep(0.01)
            assert not found, "one of them is left"
        assert being_read.abort(ANN, "x-1".__eq__)
        with pytest.raises(AbortedByCaller):
            await task
        assert found == [{"x-0", "x-1", "x-2"}]

    asyncio.run(asyncio.wait_for(test(), 30))


@pytest.mark.parametrize("is_aborted_first", [True, False])
def test_a_client_that_leaves_while_its_request_is_aborted_has_left(is_aborted_first: bool) -> None:
    async def test() -> None:
        being_read = BeingRead()

        async def read() -> None:
            async with being_read.until_started(ANN, ["x"]):
                await asyncio.Event().wait()

        task = asyncio.create_task(read())
        await asyncio.sleep(0)
        for step in (lambda: being_read.abort(ANN, lambda _: True), task.cancel)[:: 1 if is_aborted_first else -1]:
            step()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert task.cancelled()

    asyncio.run(asyncio.wait_for(test(), 30))


def test_what_is_read_in_spite_of_an_abort_does_not_run() -> None:
    async def test() -> None:
        being_read, is_read = BeingRead(), False

        async def read() -> None:
            nonlocal is_read
            async with being_read.until_started(ANN, ["x"]):
                try:
                    await asyncio.Event().wait()
                except asyncio.CancelledError:
                    is_read = True

        task = asyncio.create_task(read())
        await asyncio.sleep(0)
        assert being_read.abort(ANN, lambda _: True)
        with pytest.raises(AbortedByCaller):
            await task
        assert is_read and not task.cancelling()

    asyncio.run(asyncio.wait_for(test(), 30))
