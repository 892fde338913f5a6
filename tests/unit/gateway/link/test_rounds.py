"""How the tokens of a step are handed out: in turns, and to some requests in each iteration of the event loop."""

from __future__ import annotations

import asyncio
import itertools

import pytest

from services.common.errors import PeerError
from services.gateway.link import update_queue
from services.gateway.link.dense_messages import keep_output
from services.gateway.link.journal import Journal
from services.gateway.link.journal_entry import JournalEntry
from services.gateway.link.update_queue import Rounds, UpdateQueue
from services.pb import dense_pb2
from tests.support.clients.generation_requests import make_request

ROUND_SIZE = 3
NUM_REQUESTS = 8


@pytest.fixture(autouse=True)
def small_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(update_queue, "ROUND_SIZE", ROUND_SIZE)
    monkeypatch.setattr(update_queue, "NUM_WAKES", ROUND_SIZE)
    monkeypatch.setattr(update_queue, "ROUND_SIZE_AT_ARRIVALS", 1)
    monkeypatch.setattr(update_queue, "ROUNDS_OF_ARRIVAL", 2)


async def iteration() -> None:
    """Lets everything run that the loop has now, once."""
    await asyncio.sleep(0)


def test_some_are_handed_out_in_each_iteration_in_the_order_in_which_they_came() -> None:
    async def test() -> None:
        rounds, seen = Rounds(ROUND_SIZE), list[int]()
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


def test_rounds_are_smaller_while_requests_arrive() -> None:
    async def test() -> None:
        journal, seen = Journal(), list[int]()
        for number in range(NUM_REQUESTS):
            journal.turns.forwards.add(lambda number=number: seen.append(number))
        journal.open(make_request("r"))
        for num_seen in (1, 2, 5, 8):
            await iteration()
            assert seen == list(range(num_seen))

    asyncio.run(test())


def test_an_error_of_one_keeps_no_other_from_its_turn() -> None:
    async def test() -> None:
        errors = list[object]()
        asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context["exception"]))
        rounds, seen = Rounds(ROUND_SIZE), list[int]()

        def fail() -> None:
            raise RuntimeError("a bug")

        rounds.add(fail)
        for number in range(4):
            rounds.add(lambda number=number: seen.append(number))
        for _ in range(3):
            await iteration()
        assert seen == [0, 1, 2, 3] and len(errors) == 1

    asyncio.run(test())


async def rounds_of_arrival(journal: Journal) -> None:
    """Lets the small rounds after an arrival pass, and a large one."""
    for _ in range(update_queue.ROUNDS_OF_ARRIVAL + 1):
        for rounds in (journal.turns.forwards, journal.turns.wakes):
            rounds.add(lambda: None)
        await iteration()


def test_who_has_not_had_a_turn_gets_the_tokens_of_two_steps_at_once() -> None:
    async def test() -> None:
        journal, events = Journal(), dict[int, list[list[int]]]()
        entries = list[JournalEntry]()
        tasks = list[asyncio.Task[None]]()
        for number in range(NUM_REQUESTS):
            [entry] = journal.open(make_request(f"r{number}"))
            entries.append(entry)
            events[number] = []

            def take(entries: list[JournalEntry], number: int = number) -> bool:
                events[number] += [entry.take_new_tokens()[0] for entry in entries]
                return True

            tasks.append(asyncio.ensure_future(entry.updates.forward(take, lambda: True)))
        await rounds_of_arrival(journal)
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


@pytest.mark.parametrize("forwards", [True, False])
def test_first_tokens_come_before_the_others_in_the_order_of_their_requests(forwards: bool) -> None:
    async def test() -> None:
        journal, seen = Journal(), list[tuple[int, int]]()
        tasks, entries = list[asyncio.Task[None]](), list[JournalEntry]()

        def take(found: list[JournalEntry]) -> bool:
            seen.extend((entries.index(entry), token) for entry in found for token in entry.take_new_tokens()[0])
            return True

        async def read(updates: UpdateQueue) -> None:
            if forwards:
                await updates.forward(take, lambda: True)
            while True:
                take([await updates.next()])

        async def begin(count: int) -> None:
            for _ in range(count):
                entries.extend(journal.open(make_request(f"r{len(entries)}")))
                tasks.append(asyncio.create_task(read(entries[-1].updates)))
            await iteration()

        async def step(token: int) -> None:
            seen.clear()
            for entry in entries:
                entry.append(token, 0.0)
            for _ in range(2 * len(entries)):
                await iteration()

        await begin(NUM_REQUESTS)
        await step(10)
        await begin(2)
        await step(11)
        numbers = [number for number, _ in seen]
        assert sorted(seen) == [(number, 11) for number in range(NUM_REQUESTS + 2)]
        new = [numbers.index(NUM_REQUESTS), numbers.index(NUM_REQUESTS + 1)]
        assert new == sorted(new) and new[-1] <= ROUND_SIZE + 1, numbers  # behind those whose turn had come
        await step(12)
        assert sorted(seen) == [(number, 12) for number in range(NUM_REQUESTS + 2)]
        assert [number for number, _ in seen] == list(range(NUM_REQUESTS + 2)), "they are new no more"
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(test())


def test_tasks_that_wait_for_tokens_have_turns_too_and_each_token_comes_once() -> None:
    async def test() -> None:
        journal, events = Journal(), dict[int, list[list[int]]]()

        async def read(number: int, updates: UpdateQueue) -> None:
            while True:
                entry = await updates.next()
                events[number].append(entry.take_new_tokens()[0])

        tasks, entries = list[asyncio.Task[None]](), list[JournalEntry]()
        for number in range(NUM_REQUESTS):
            events[number] = []
            entries += journal.open(make_request(f"r{number}"))
            tasks.append(asyncio.create_task(read(number, entries[-1].updates)))
        await rounds_of_arrival(journal)
        num_read = []
        for token in (10, 11, None, None, None, None):
            for entry in entries:
                if token is not None:
                    entry.append(token, 0.0)
            await iteration()
            num_read.append(sum(map(len, events.values())))
        assert num_read[:2] == [ROUND_SIZE, 2 * ROUND_SIZE], "the first tasks run in the next iteration"
        assert all(list(itertools.chain(*each)) == [10, 11] for each in events.values())
        assert events[NUM_REQUESTS - 1] == [[10, 11]]
        entries[0].fail(PeerError("lost"))
        entries[1].append(12, 0.0)
        for _ in range(3):
            await iteration()
        with pytest.raises(PeerError, match="lost"):
            await tasks[0]
        assert events[1][-1] == [12]
        for task in tasks[1:]:
            task.cancel()
        await asyncio.gather(*tasks[1:], return_exceptions=True)
        entries[2].append(12, 0.0)  # nobody waits any more
        await iteration()

    asyncio.run(test())


def test_a_task_gets_all_answers_of_its_request_in_one_turn() -> None:
    async def test() -> None:
        journal, seen = Journal(), list[int]()
        entries = journal.open(make_request("r", n=5, best_of=5))

        async def read() -> None:
            while True:
                entry = await entries[0].updates.next()
                seen.append(entry.index)
                entry.take_new_tokens()

        task = asyncio.create_task(read())
        await iteration()
        for entry in entries:
            entry.append(10, 0.0)
        for _ in range(2):
            await iteration()
        assert seen == [0, 1, 2, 3, 4]
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(test())


@pytest.mark.parametrize("count", [1, 2, 8, 33, 200])
def test_the_first_sequence_of_a_step_is_another_one_each_time(count: int) -> None:
    """Nobody's tokens always come last; those of one sequence, of which a step may have several, stay in order."""
    journal = Journal()
    stream, order = journal.new_stream(), list[int]()

    class Noting(UpdateQueue):
        def put(self, entry: JournalEntry) -> None:
            order.append(entry.seq_id)

    for number in range(count):
        [entry] = journal.open(make_request(f"r{number}", max_tokens=1000))
        entry.updates = Noting(journal.turns)
        stream.add(entry)
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
