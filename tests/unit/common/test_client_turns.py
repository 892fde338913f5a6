"""Clients who wait take turns: by tenant, then by address. What counts is the order of turns, never their time."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from services.common.errors import CapacityError
from services.common.fairness import Client, ClientTurns

BUSY, OTHER, THIRD = (0, 1), (0, 2), (0, 3)


async def order_of_turns(asked: Sequence[tuple[str, Client]], num_places: int = 1) -> list[str]:
    """Who had a turn, in order; all of them have asked before the first turn ends."""
    turns, order = ClientTurns(num_places), list[str]()

    async def take(name: str, client: Client) -> None:
        async with turns.turn(client):
            order.append(name)
            await asyncio.sleep(0)

    await asyncio.gather(*(take(*each) for each in asked))
    return order


def test_a_newcomer_waits_for_one_turn_of_a_client_that_has_many_waiting() -> None:
    asked = [(f"busy {i}", BUSY) for i in range(10)] + [("other", OTHER)]
    order = asyncio.run(order_of_turns(asked))
    # The first one has its turn already when the newcomer asks, and the second one asked before.
    assert order == ["busy 0", "busy 1", "other", *(f"busy {i}" for i in range(2, 10))]


def test_clients_with_as_much_to_do_alternate() -> None:
    asked = [(f"{client[1]}{i}", client) for client in (BUSY, OTHER, THIRD) for i in range(4)]
    order = asyncio.run(order_of_turns([("first", BUSY), *asked]))
    assert [each[0] for each in order[1:]] == ["1", "2", "3"] * 4
    for client in "123":
        own = [each for each in order if each[0] == client]
        assert own == sorted(own), "a client's own requests keep their order"


def test_a_tenant_with_many_addresses_has_no_more_turns_than_one_with_one() -> None:
    asked = [(f"many {i}", (7, i)) for i in range(6)] + [(f"one {i}", (8, 1)) for i in range(3)]
    order = asyncio.run(order_of_turns([("first", (7, 0)), *asked]))
    assert [each.split()[0] for each in order[1:7]] == ["many", "one"] * 3


def test_as_many_as_there_are_places_have_turns_at_once() -> None:
    async def body() -> None:
        turns, num_held, most = ClientTurns(2), 0, 0

        async def take(client: Client) -> None:
            nonlocal num_held, most
            async with turns.turn(client):
                num_held += 1
                most = max(most, num_held)
                await asyncio.sleep(0)
                num_held -= 1

        await asyncio.gather(*(take((0, i % 3)) for i in range(9)))
        assert most == 2 and num_held == 0
        assert turns._num_free == 2 and not turns._waiting

    asyncio.run(body())


def test_those_who_give_up_hold_nobody_up_and_no_place_is_lost() -> None:
    async def body() -> None:
        turns, order = ClientTurns(1), list[str]()

        async def take(name: str, client: Client) -> None:
            async with turns.turn(client):
                order.append(name)
                await asyncio.sleep(0)

        async with turns.turn(BUSY):
            tasks = {name: asyncio.create_task(take(name, client)) for name, client in
                     (("a", BUSY), ("b", OTHER), ("c", BUSY), ("d", THIRD))}  # fmt: skip
            await asyncio.sleep(0)
            tasks["b"].cancel()
        tasks["a"].cancel()  # the place is its own already
        results = await asyncio.gather(*tasks.values(), return_exceptions=True)
        assert [isinstance(each, asyncio.CancelledError) for each in results] == [True, True, False, False]
        assert sorted(order) == ["c", "d"]
        assert turns._num_free == 1 and not turns._waiting

    asyncio.run(body())


def test_an_error_in_a_turn_ends_only_this_turn() -> None:
    async def body() -> None:
        turns = ClientTurns(1)
        with pytest.raises(ValueError, match="mine"):
            async with turns.turn(BUSY):
                raise ValueError("mine")
        async with asyncio.timeout(5), turns.turn(OTHER):
            pass

    asyncio.run(body())


def test_who_has_waited_too_long_is_refused_and_others_go_on() -> None:
    async def body() -> None:
        turns = ClientTurns(1, 0.01, "a file")
        async with turns.turn(BUSY):
            with pytest.raises(CapacityError, match=r"a file has waited 0\.01 s for its turn"):
                async with turns.turn(OTHER):
                    pass
        async with turns.turn(OTHER):
            pass
        assert turns._num_free == 1 and not turns._waiting

    asyncio.run(body())
