"""How the tokens of a step are handed out: in turns, and to some requests in each iteration of the event loop."""

from __future__ import annotations

import asyncio

import pytest

from services.gateway.link import journal_entry
from services.gateway.link.dense_messages import keep_output
from services.gateway.link.journal import Journal
from services.gateway.link.journal_entry import JournalEntry, Rounds, UpdateQueue
from services.pb import dense_pb2
from tests.support.clients.generation_requests import make_request

ROUND_SIZE = 3
NUM_REQUESTS = 8


@pytest.fixture(autouse=True)
def small_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_entry, "ROUND_SIZE", ROUND_SIZE)


async def iteration() -> None:
    """Lets everything run that the loop has now, once."""
    await asyncio.sleep(0)


def test_some_are_handed_out_in_each_iteration_in_the_order_in_which_they_came() -> None:
    async def test() -> None:
        rounds, seen = Rounds(), list[int]()
        for number in range(NUM_REQUESTS):
            rounds.add(lambda number=number: seen.append(number))
        assert seen == [], "other updates of the same step come first"
        for num_seen in (3, 6, 8, 8):
            await iteration()
            assert seen == list(range(num_seen))
        rounds.add(lambda: seen.append(8))
        await iteration()
        assert seen == list(range(9))

    asyncio.run(test())


def test_an_error_of_one_keeps_no_other_from_its_turn() -> None:
    async def test() -> None:
        errors = list[object]()
        asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context["exception"]))
        rounds, seen = Rounds(), list[int]()

        def fail() -> None:
            raise RuntimeError("a bug")

        rounds.add(fail)
        for number in range(4):
            rounds.add(lambda number=number: seen.append(number))
        for _ in range(3):
            await iteration()
        assert seen == [0, 1, 2, 3] and len(errors) == 1

    asyncio.run(test())


def test_who_has_not_had_a_turn_gets_the_tokens_of_two_steps_at_once() -> None:
    async def test() -> None:
        journal, events = Journal(), dict[int, list[list[int]]]()
        entries = list[JournalEntry]()
        tasks = list[asyncio.Task[None]]()
        for number in range(NUM_REQUESTS):
            updates = UpdateQueue(journal.rounds)
            [entry] = journal.open(make_request(f"r{number}"), updates)
            entries.append(entry)
            events[number] = []

            def take(entries: list[JournalEntry], number: int = number) -> bool:
                events[number] += [entry.take_new_tokens()[0] for entry in entries]
                return True

            tasks.append(asyncio.ensure_future(updates.forward(take, lambda: True)))
        await iteration()
        for token in (10, 11):  # the second step comes when one round is over
            for entry in entries:
                entry.append(token, 0.0)
            await iteration()
        for _ in range(NUM_REQUESTS):
            await iteration()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert [events[number] for number in range(ROUND_SIZE)] == [[[10], [11]]] * ROUND_SIZE
        assert [events[number] for number in range(ROUND_SIZE, NUM_REQUESTS)] == [[[10, 11]]] * (
            NUM_REQUESTS - ROUND_SIZE
        )

    asyncio.run(test())


@pytest.mark.parametrize("count", [1, 2, 8, 33, 200])
def test_the_first_sequence_of_a_step_is_another_one_each_time(count: int) -> None:
    """Nobody's tokens always come last; those of one sequence, of which a step may have several, stay in order."""
    journal = Journal()
    stream, order = journal.new_stream(), list[int]()
    for number in range(count):
        updates = UpdateQueue()
        updates.put = lambda entry: order.append(entry.seq_id)
        [entry] = journal.open(make_request(f"r{number}", max_tokens=1000), updates)
        journal.assign(entry, stream)
    entries = list(stream.unfinished())
    tokens = [(entry.seq_id, 100 * row + k) for row, entry in enumerate(entries) for k in range(1 + row % 3)]
    places = {entry.seq_id: list[int]() for entry in entries}
    for step in range(1, 3 * count + 1):
        order.clear()
        output = dense_pb2.StepOutput(step_id=step)
        output.seq_ids.extend(seq_id for seq_id, _ in tokens)
        output.token_ids.extend(token_id for _, token_id in tokens)
        keep_output(stream, output)
        assert sorted(order) == sorted(places), "each sequence is announced once"
        for place, seq_id in enumerate(order):
            places[seq_id].append(place)
        for row, entry in enumerate(entries):
            new, _, _ = entry.take_new_tokens()
            assert new == [100 * row + k for k in range(1 + row % 3)]
    for of_one in places.values():
        assert min(of_one) <= count // 16 and max(of_one) >= count - 1 - count // 16
        assert sum(of_one) / len(of_one) == pytest.approx((count - 1) / 2, abs=count / 8)
