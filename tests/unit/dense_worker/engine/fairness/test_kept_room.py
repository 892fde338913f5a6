"""One client's waiting sequences leave room for those of others: counted in the dense worker's own queue."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.common.errors import CapacityError
from services.common.fairness import KEPT_PARTS, SMALL_PARTS
from services.dense_worker.engine.sequence import Sequence
from services.dense_worker.engine.waiting_queue import WaitingQueue
from tests.support.dense.scheduler_cluster import make_sequence
from tests.support.dense.sequences import ask

LIMIT = 640


class Queue:
    """A queue of which sequences are put into by client."""

    def __init__(self, max_num_tokens: int = 10**6) -> None:
        self.queue = WaitingQueue(LIMIT, max_num_tokens, 1.0)
        self._num_sequences = 0

    def enter(self, client: int, num_tokens: int = 3, tenant: int = 0) -> Sequence:
        self._num_sequences += 1
        sequence = make_sequence(self._num_sequences, num_tokens, 4)
        ask(sequence, tenant=tenant, client=client)
        self.queue.admit(sequence)
        self.queue.push(sequence)
        return sequence

    def fill(self, client: int, num_tokens: int = 3, tenant: int = 0) -> int:
        """How many sequences of a client are accepted until one is refused."""
        count = 0
        while True:
            try:
                self.enter(client, num_tokens, tenant)
            except CapacityError:
                return count
            count += 1


def test_one_client_leaves_an_eighth_to_others() -> None:
    queue = Queue()
    assert queue.fill(1) == LIMIT - LIMIT // KEPT_PARTS
    with pytest.raises(CapacityError, match="this client has 560 of 560 waiting sequences; with 1 more"):
        queue.enter(1)
    assert queue.fill(2) == LIMIT // SMALL_PARTS
    assert queue.fill(1, tenant=7) == LIMIT // SMALL_PARTS, "the same address with another key is another client"
    others = sum(queue.fill(client) for client in range(3, 30))
    assert len(queue.queue) == LIMIT == 560 + 2 * 10 + others, "the limit of all holds too"
    with pytest.raises(CapacityError, match="640 sequences are waiting, the limit is 640"):
        queue.enter(99)


def test_two_busy_clients_share_the_rest() -> None:
    queue = Queue()
    counts = {1: 0, 2: 0}
    for turn in range(2 * LIMIT):
        try:
            queue.enter(1 + turn % 2)
            counts[1 + turn % 2] += 1
        except CapacityError:
            continue
    assert counts == {1: 280, 2: 280}


def test_the_same_holds_for_prompt_tokens() -> None:
    queue = Queue(max_num_tokens=6400)
    assert queue.fill(1, 100) == 64 - 64 // KEPT_PARTS
    assert queue.fill(2, 50) == 100 // 50
    queue.enter(3, 500)  # its only one may be long
    with pytest.raises(CapacityError, match="prompt of 500 tokens 6700 would be waiting"):
        queue.enter(4, 500)


def test_sequences_without_a_client_may_use_all_of_it() -> None:
    assert Queue().fill(0) == LIMIT


@given(st.lists(st.tuples(st.integers(1, 3), st.booleans()), max_size=60))
def test_what_leaves_the_queue_makes_room_again(steps: list[tuple[int, bool]]) -> None:
    queue, waiting = Queue(), dict[int, list[Sequence]]({1: [], 2: [], 3: []})
    for client, enters in steps:
        if enters:
            waiting[client].append(queue.enter(client))
        elif waiting[client]:
            sequence = waiting[client].pop()
            queue.queue.remove(sequence)
            queue.queue.forget(sequence)
    num_others = len(waiting[2]) + len(waiting[3])
    assert queue.fill(1) == LIMIT - LIMIT // KEPT_PARTS - num_others - len(waiting[1])
