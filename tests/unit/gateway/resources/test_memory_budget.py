"""What open requests hold together is limited, with room for clients that hold little. What does not fit waits."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from types import SimpleNamespace
from typing import Any

import pytest

from services.common.errors import CapacityError, InvalidRequest
from services.gateway.resources import memory_budget
from services.gateway.resources.memory_budget import (
    SMALL_BYTES,
    SMALL_PARTS,
    TINY_BYTES,
    HeldMemory,
    MemoryBudget,
    Purpose,
)

GREEDY, OTHER, THIRD, ANYBODY = (0, 1), (0, 2), (0, 3), (0, 0)
LONG_S = 60.0  # longer than any test


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, LONG_S / 2))


async def settle() -> None:
    """Lets all tasks go on as far as they can."""
    for _ in range(10):
        await asyncio.sleep(0)


def test_a_request_that_could_never_fit_is_wrong_and_names_value_and_limit() -> None:
    async def test() -> None:
        budget = MemoryBudget(1000, LONG_S, 10)
        message = r"1001 bytes of memory for logits, gateway.max_held_bytes is 1000: ask for less"
        with pytest.raises(InvalidRequest, match=message) as refused:
            await HeldMemory(budget, GREEDY).reserve(1001, "logits", "n", "ask for less")
        assert refused.value.param == "n"
        held = HeldMemory(budget, GREEDY)
        await held.reserve(600, "its body")
        with pytest.raises(InvalidRequest, match=r"401 bytes of memory for logits beside 600 others"):
            await held.reserve(401, "logits")
        with pytest.raises(InvalidRequest, match=r"beside 600 others, .* is 1000, 1/8 of it is kept for other clients"):
            await held.reserve(276, "logits")  # a client that holds something does not get the last eighth
        await held.reserve(275, "logits")

    run(test())


def test_the_sum_over_all_requests_counts_until_they_end() -> None:
    async def test() -> None:
        budget = MemoryBudget(1000)
        first, second = HeldMemory(budget, ANYBODY), HeldMemory(budget, ANYBODY)
        await first.reserve(600, "its body")
        await first.reserve(100, "logits")
        with pytest.raises(CapacityError, match=r"700 bytes of memory, 301 more for logits would exceed 1000"):
            await second.reserve(301, "logits")
        await second.reserve(300, "logits")
        first.release()
        first.release()
        assert budget.num_held == 300
        await second.reserve(700, "logits")

    run(test())


def test_the_last_eighth_is_for_clients_that_hold_little() -> None:
    async def test() -> None:
        budget = MemoryBudget(6400)
        greedy = HeldMemory(budget, GREEDY)
        for _ in range(14):
            await greedy.reserve(400, "logits")
        with pytest.raises(CapacityError, match=r"this client has 5600 of 5600 bytes of memory .*gateway.max_held_by"):
            await HeldMemory(budget, GREEDY).reserve(101, "logits")
        await HeldMemory(budget, OTHER).reserve(800, "logits")

    run(test())


def test_what_has_been_made_already_counts_but_is_not_refused() -> None:
    async def test() -> None:
        budget = MemoryBudget(1000)
        held = HeldMemory(budget, OTHER)
        held.add(1200)
        with pytest.raises(CapacityError):
            await HeldMemory(budget, GREEDY).reserve(1, "its body")
        held.release()
        assert budget.num_held == 0

    run(test())


def test_what_does_not_fit_waits_until_it_does_clients_in_turns_and_each_in_order() -> None:
    async def test() -> None:
        budget, order = MemoryBudget(1000, LONG_S, 10), list[str]()

        async def ask(client: tuple[int, int], name: str) -> HeldMemory:
            held = HeldMemory(budget, client)
            await held.reserve(500, "logits")
            order.append(name)
            return held

        holding = HeldMemory(budget, ANYBODY)
        await holding.reserve(600, "logits")
        tasks = [
            asyncio.create_task(ask(client, name))
            for client, name in ((GREEDY, "a1"), (GREEDY, "a2"), (GREEDY, "a3"), (OTHER, "b1"))
        ]
        await settle()
        assert order == [] and budget.num_waiting == 4
        holding.release()
        await settle()
        while tasks:
            done = [task for task in tasks if task.done()]
            assert done and budget.num_held <= 1000
            tasks = [task for task in tasks if not task.done()]
            done[0].result().release()
            tasks += done[1:]
            await settle()
        assert order == ["a1", "b1", "a2", "a3"]
        assert budget.num_held == budget.num_waiting == 0

    run(test())


def test_a_small_request_of_another_client_passes_those_that_wait() -> None:
    async def test() -> None:
        budget = MemoryBudget(6400, LONG_S, 10)
        running = HeldMemory(budget, GREEDY)
        await running.reserve(5000, "logits")
        running.settle()
        waiting = asyncio.create_task(HeldMemory(budget, GREEDY).reserve(1000, "logits"))
        await settle()
        await HeldMemory(budget, OTHER).reserve(100, "its body")
        behind = asyncio.create_task(HeldMemory(budget, GREEDY).reserve(1, "its body"))
        await settle()
        assert not waiting.done() and not behind.done()
        waiting.cancel()  # its client has gone away
        await behind
        assert (budget.num_waiting, budget.num_held) == (0, 5101)

    run(test())


MANY = tuple((0, number) for number in range(1, 41))


@pytest.mark.parametrize("clients", [(ANYBODY,), (GREEDY,), (GREEDY, OTHER), MANY], ids=["any", "one", "two", "many"])
@pytest.mark.parametrize("features", [(), (40_000,), (80_000,) * 3], ids=["bodies", "small ones", "large ones"])
def test_requests_that_come_together_wait_for_each_other_only_as_long_as_others_end(
    clients: tuple[tuple[int, int], ...], features: tuple[int, ...]
) -> None:
    """A few fit at once. A body comes in pieces, and what is made of it is asked for in parts."""

    async def test() -> None:
        budget = MemoryBudget(1_000_000, LONG_S, 1000)  # nobody may wait for so long
        most = 0

        async def request(client: tuple[int, int]) -> None:
            nonlocal most
            body, made = HeldMemory(budget, client), HeldMemory(budget, client)
            try:
                for _ in range(10):
                    await body.reserve_body(6_000, "its body")
                    await asyncio.sleep(0)
                body.end_body()
                for num_bytes in features:
                    await made.reserve(num_bytes, "pictures")
                    await asyncio.sleep(0)
                made.settle()
                body.settle()
                most = max(most, budget.num_held)
                await asyncio.sleep(0.001)
            finally:
                made.release()
                body.release()

        await asyncio.gather(*(request(clients[index % len(clients)]) for index in range(200)))
        assert 400_000 < most <= 1_000_000
        check_empty(budget)

    run(test())


def check_empty(budget: MemoryBudget) -> None:
    counts = (budget._held, budget._held_waiting, budget._held_small, budget._unsettled, budget._bodies)
    assert not any(each.total for each in counts)
    assert not any(each.count.total or each.holder for each in budget._last.values())
    assert not any(queue.waiting for queue in budget._queues.values())
    assert not budget._held_of and not budget._waiting_of and not budget._granted_s


def test_who_leaves_makes_room_for_those_that_waited_for_it() -> None:
    """Also one that was the last to get more."""

    async def test() -> None:
        budget = MemoryBudget(1_000_000, LONG_S, 10)
        held = [HeldMemory(budget, ANYBODY) for _ in range(4)]
        for each in held:
            await each.reserve(240_000, "pictures")
        assert budget.num_held == 960_000, "the last one has gone beyond the line"
        waiting = [asyncio.create_task(each.reserve(30_000, "pictures")) for each in held[:3]]
        await settle()
        assert budget.num_waiting == 3
        await held[3].reserve(40_000, "pictures")
        held[3].release()
        await waiting[0]
        held[0].settle()  # it goes on
        held[0].release()
        await asyncio.gather(*waiting[1:])
        for each in held[1:]:
            each.release()
        check_empty(budget)

    run(test())


def test_a_client_that_waits_often_leaves_places_for_others() -> None:
    async def test() -> None:
        budget = MemoryBudget(6400, LONG_S, 64)
        full = HeldMemory(budget, ANYBODY)
        full.add(6400)
        waiting = [asyncio.create_task(HeldMemory(budget, GREEDY).reserve(100, "logits")) for _ in range(60)]
        await settle()
        refused = [each.exception() for each in waiting if each.done()]
        assert len(refused) == 4 and budget.num_waiting == 56
        assert "56 of 56 requests that wait; with 1 more it would use the last 1/8 of the limit" in str(refused[0])
        waiting += [asyncio.create_task(HeldMemory(budget, (0, 2 + i)).reserve(100, "logits")) for i in range(9)]
        await settle()
        assert budget.num_waiting == 64 and "64 requests wait already" in str(waiting[-1].exception())
        for each in waiting:
            each.cancel()
        await asyncio.wait(waiting)
        full.release()
        check_empty(budget)

    run(test())


def test_an_upload_waits_for_what_works_and_goes_before_those_that_hold_nothing() -> None:
    async def test() -> None:
        budget = MemoryBudget(1000, LONG_S, 10)
        working, upload = HeldMemory(budget, GREEDY), HeldMemory(budget, GREEDY)
        await upload.reserve(100, "its body")
        await working.reserve(700, "logits")
        working.settle()
        first = asyncio.create_task(HeldMemory(budget, GREEDY).reserve(600, "logits"))
        await settle()
        await upload.reserve(10, "its body")  # there is room for it, though another request waits
        more = asyncio.create_task(upload.reserve(400, "its body"))
        await settle()
        assert not first.done() and not more.done()
        working.release()
        await more
        upload.release()
        await first
        assert (budget.num_waiting, budget.num_held) == (0, 600)

    run(test())


def test_waiting_is_bounded_in_time_and_in_number() -> None:
    async def test() -> None:
        budget = MemoryBudget(1000, 0.05, 2)
        await HeldMemory(budget, ANYBODY).reserve(900, "logits")
        refused = await asyncio.gather(
            *(HeldMemory(budget, ANYBODY).reserve(101, "logits") for _ in range(3)), return_exceptions=True
        )
        assert all(isinstance(each, CapacityError) for each in refused), refused
        assert "waited for 0.05 s, gateway.max_held_wait_s" in str(refused[0])
        assert "900 bytes of memory, 101 more for logits would exceed 1000" in str(refused[0])
        assert "2 requests wait already, gateway.max_held_waiting" in str(refused[2])
        assert (budget.num_waiting, budget.num_held) == (0, 900)

    run(test())


def test_who_leaves_with_its_part_just_given_gives_it_back() -> None:
    async def test() -> None:
        budget = MemoryBudget(1000, LONG_S, 2)
        holding = HeldMemory(budget, ANYBODY)
        await holding.reserve(900, "logits")
        waiting = asyncio.create_task(HeldMemory(budget, ANYBODY).reserve(500, "logits"))
        await settle()
        holding.release()
        assert budget.num_held == 500
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        assert budget.num_held == 0

    run(test())


def test_who_leaves_with_the_place_beyond_the_line_just_given_lets_the_next_have_it() -> None:
    async def test() -> None:
        budget = MemoryBudget(64_000, LONG_S, 10)
        body = Purpose.BODY
        for client in (OTHER, THIRD):  # so that neither holds little
            await HeldMemory(budget, client).reserve(2000, "logits")
        await HeldMemory(budget, GREEDY).reserve(15_000, "its body", purpose=body)
        last = HeldMemory(budget, GREEDY)
        await last.reserve(8000, "its body", purpose=body)  # beyond the line

        async def ask(client: tuple[int, int]) -> None:
            held = HeldMemory(budget, client)
            try:
                await held.reserve(8000, "its body", purpose=body)
            except asyncio.CancelledError:
                held.release()
                raise

        first, second = (asyncio.create_task(ask(client)) for client in (OTHER, THIRD))
        await settle()
        assert budget.num_waiting == 2
        last.end_body()  # the place is given to the first, which leaves before it has noticed
        first.cancel()
        await settle()
        assert first.cancelled() and second.done() and budget.num_waiting == 0

    run(test())


def test_small_bodies_pass_those_that_wait_up_to_a_part_of_the_budget_and_those_of_aborts_up_to_twice_as_much() -> None:
    async def test() -> None:
        budget = MemoryBudget(16 * 5 * SMALL_BYTES, LONG_S, 1000)
        full, small = HeldMemory(budget, ANYBODY), list[HeldMemory]()
        full.add(budget.max_bytes)

        async def fill(num_bytes: int) -> asyncio.Task[None]:
            """Returns the first that waits."""
            while len(small) < 1000:
                held = HeldMemory(budget, ANYBODY)
                body = asyncio.create_task(held.reserve_body(num_bytes, "its body"))
                await settle()
                if not body.done():
                    return body
                small.append(held)
            raise AssertionError("none has waited")

        waiting = [await fill(SMALL_BYTES)]
        assert budget.num_held == budget.max_bytes + budget.max_bytes // SMALL_PARTS
        waiting.append(await fill(TINY_BYTES))
        assert budget.num_held == budget.max_bytes + 2 * budget.max_bytes // SMALL_PARTS
        small.pop().hand_over().release()
        aborting = HeldMemory(budget, ANYBODY)
        await aborting.reserve_body(TINY_BYTES, "an abort")
        aborting.release()
        for each in (full, *small):
            each.release()
        await asyncio.gather(*waiting)
        assert budget._held_small.total == 0

    run(test())


def test_a_body_whose_first_piece_is_small_waits_in_order_of_arrival() -> None:
    async def test() -> None:
        budget, order = MemoryBudget(100_000, LONG_S, 10), list[int]()
        full = HeldMemory(budget, ANYBODY)
        full.add(90_000)

        async def upload(name: int, *pieces: int) -> None:
            held = HeldMemory(budget, ANYBODY)
            for each in pieces:
                await held.reserve_body(each, "its body")
            order.append(name)
            held.release()

        uploads = [(20_000,), (20_000,), (400, 400, 19_200), (20_000,)]
        tasks = list[asyncio.Task[None]]()
        for name, pieces in enumerate(uploads):
            tasks.append(asyncio.create_task(upload(name, *pieces)))
            await settle()
        full.release()
        await asyncio.gather(*tasks)
        assert order == [0, 1, 2, 3]
        assert (budget.num_held, budget._held_small.total) == (0, 0)

    run(test())


def test_a_request_waits_as_long_as_others_of_its_client_get_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many requests at once of one client: each is short, the last ones wait for all."""
    now = 100.0
    monkeypatch.setattr(memory_budget, "time", SimpleNamespace(monotonic=lambda: now))

    async def test() -> None:
        nonlocal now
        budget = MemoryBudget(1000, 0.01, 100)
        held = [HeldMemory(budget, GREEDY) for _ in range(21)]
        await held[0].reserve(800, "its body")
        waiting = [asyncio.create_task(each.reserve(800, "its body")) for each in held[1:]]
        await until_waiting(budget, 20)
        for i in range(10):
            now += 0.008
            await asyncio.sleep(0.02)  # those who wait look at the clock
            held[i].release()
            await waiting[i]
        assert budget.num_waiting == 10
        now += 0.008
        await asyncio.sleep(0.02)
        assert budget.num_waiting == 10
        now += 0.008
        refused = await asyncio.gather(*waiting[10:], return_exceptions=True)
        assert all("waited for 0.01 s" in str(each) for each in refused)
        held[10].release()
        assert not budget.num_held and not budget.num_waiting and not budget._granted_s

    run(test())


async def until_waiting(budget: MemoryBudget, count: int) -> None:
    while budget.num_waiting < count:  # noqa: ASYNC110
        await asyncio.sleep(0)
