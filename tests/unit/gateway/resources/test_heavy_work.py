"""Heavy work has turns between the other callbacks of the event loop, and clients take turns."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Iterator

import pytest

from services.gateway.resources.heavy_work import HeavyWork, work_for


def compute(seconds: float) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def test_between_two_turns_a_chain_of_other_callbacks_comes_to_its_end() -> None:
    """A small request is such a chain: it must not wait for a turn of heavy work at each of its steps."""

    async def test() -> None:
        work, order = HeavyWork(), []

        async def heavy(name: str) -> None:
            await work.turn()
            order.append(name)
            compute(0.05)

        async def small() -> None:
            for _ in range(20):
                await asyncio.sleep(0)
                compute(0.0005)
            order.append("small")

        await asyncio.gather(*(heavy(f"heavy {i}") for i in range(4)), small())
        assert order.index("small") <= 2, order
        work.close()

    asyncio.run(test())


def test_of_small_requests_that_arrive_together_one_begins_in_each_iteration_of_the_loop() -> None:
    async def test() -> None:
        work, order = HeavyWork(), list[str]()

        async def small(name: str) -> None:
            await work.beginning()
            order.append(name)

        async def stream() -> None:
            while len(order) < 40:
                order.append("-")
                await asyncio.sleep(0)

        requests = [asyncio.create_task(small(str(i))) for i in range(20)]
        await asyncio.gather(*requests[:10], stream(), *requests[10:])
        begun = [i for i, each in enumerate(order) if each != "-"]
        assert [order[i] for i in begun] == [str(i) for i in range(20)]
        assert all(second > first + 1 for first, second in itertools.pairwise(begun)), order
        work.close()

    asyncio.run(test())


def test_a_small_request_that_arrives_alone_begins_at_once_and_clients_take_turns() -> None:
    async def test() -> None:
        work, order = HeavyWork(), list[int]()

        async def small(client: int) -> None:
            work_for((0, client))
            await work.beginning()
            order.append(client)

        alone = small(3)
        with pytest.raises(StopIteration):
            alone.send(None)
        await asyncio.sleep(0)
        await asyncio.gather(*(small(1) for _ in range(5)), small(2))
        assert order[0] == 3
        assert order.index(2) <= 4, order
        work.close()

    asyncio.run(test())


def test_clients_take_turns() -> None:
    async def test() -> None:
        work, order = HeavyWork(), []

        async def heavy(client: int) -> None:
            work_for((0, client))
            await work.turn()
            order.append(client)

        await asyncio.gather(*(heavy(1) for _ in range(5)), heavy(2))
        assert order.index(2) <= 3, order  # behind the one that has a turn and two that wait for the next
        work.close()

    asyncio.run(test())


def test_long_work_is_made_in_slices_that_together_are_the_whole() -> None:
    def made() -> Iterator[bytes]:
        for i in range(20):
            compute(0.001)
            yield b"%d," % i

    async def test() -> None:
        work, num_others = HeavyWork(), 0

        async def count_iterations() -> None:
            nonlocal num_others
            while True:
                num_others += 1
                await asyncio.sleep(0)

        counter = asyncio.create_task(count_iterations())
        slices = [each async for each in work.pieces(made())]
        counter.cancel()
        assert b"".join(slices) == b"".join(b"%d," % i for i in range(20))
        assert len(slices) > 5 and num_others > len(slices)
        assert await work.whole(iter([])) == b""
        work.close()

    asyncio.run(test())


def test_the_last_part_of_a_request_comes_before_what_others_of_its_client_begin_with() -> None:
    """Else memory of all of them is held until the last one has begun. Other clients keep their turns."""

    async def test() -> None:
        work, order = HeavyWork(), list[str]()

        async def request(name: str, client: tuple[int, int]) -> None:
            work_for(client)
            await work.in_thread(order.append, f"{name} begins")
            await work.in_thread(order.append, f"{name} ends", goes_on=True)

        own = [request(name, (0, 1)) for name in "abcdef"]
        await asyncio.gather(*own, request("other", (0, 2)))
        assert len(order) == 14
        for name, next_but_one in zip("abcd", "cdef", strict=True):
            assert order.index(f"{name} ends") < order.index(f"{next_but_one} begins"), order
        assert order.index("other begins") <= 2, order
        work.close()

    asyncio.run(test())
