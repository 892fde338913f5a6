"""The limits of the queue, what counts in it, and draining."""

from __future__ import annotations

import asyncio
import time

import pytest

from services.common.errors import CapacityError, Draining, PermissionDenied, RateLimited, TwostrokeError
from services.gateway.access.access import Access, Caller
from services.gateway.access.admission import Admission, Ticket
from services.gateway.access.rate_limits import RateLimits, Usage
from services.gateway.link.journal import Journal
from services.gateway.link.journal_entry import JournalEntry
from tests.support.clients.generation_requests import make_request

ANYBODY = Access(None, "").identify(None)


class Queue:
    """An `Admission` and its `Journal`, connected as in `RequestService`."""

    def __init__(self, max_num_waiting: int = 3, max_num_waiting_tokens: int = 100) -> None:
        self.journal = Journal()
        self.admission = Admission(self.journal, max_num_waiting, max_num_waiting_tokens)
        self._num_requests = 0

    def enter(
        self, num_tokens: int = 1, best_of: int = 1, caller: Caller = ANYBODY
    ) -> tuple[Ticket, list[JournalEntry]]:
        ticket = self.admission.open(caller)
        self._num_requests += 1
        request = make_request(f"r{self._num_requests}", prompt_token_ids=[1] * num_tokens, best_of=best_of)
        try:
            ticket.admit(request)
        except TwostrokeError:
            ticket.close()
            raise
        return ticket, self.journal.open(request)


def test_only_waiting_answers_count() -> None:
    queue = Queue(max_num_waiting=3)
    entered = [queue.enter() for _ in range(3)]
    with pytest.raises(CapacityError, match="3 answers are waiting to start, 1 more would exceed the limit of 3"):
        queue.enter()
    [first] = entered[0][1]
    first.start(0.0, 0)
    queue.enter()
    with pytest.raises(CapacityError):
        queue.enter()
    [second] = entered[1][1]
    queue.journal.close(second)  # its client went away
    queue.enter()


def test_every_answer_of_a_request_counts() -> None:
    queue = Queue(max_num_waiting=5, max_num_waiting_tokens=100)
    queue.enter(best_of=4)
    with pytest.raises(CapacityError, match="4 answers are waiting to start, 2 more would exceed the limit of 5"):
        queue.enter(best_of=2)
    queue.enter()


def test_waiting_tokens_are_limited_but_a_single_prompt_may_exceed_the_limit() -> None:
    queue = Queue(max_num_waiting=10, max_num_waiting_tokens=100)
    _, [long] = queue.enter(num_tokens=500)
    with pytest.raises(CapacityError, match="500 prompt tokens are waiting, 1 more would exceed the limit"):
        queue.enter()
    long.start(0.0, 0)
    queue.enter(num_tokens=60)
    with pytest.raises(CapacityError, match="60 prompt tokens are waiting, 42 more"):
        queue.enter(num_tokens=21, best_of=2)
    queue.enter(num_tokens=20, best_of=2)


def test_requests_that_are_being_tokenized_count() -> None:
    queue = Queue(max_num_waiting=2)
    tickets = [queue.admission.open(ANYBODY) for _ in range(2)]
    with pytest.raises(CapacityError):
        queue.admission.open(ANYBODY)
    tickets[0].close()  # the request was not valid
    tickets[0].close()
    queue.admission.open(ANYBODY)
    with pytest.raises(CapacityError):
        queue.admission.open(ANYBODY)


def test_the_retry_delay_follows_the_speed_of_the_queue() -> None:
    queue = Queue(max_num_waiting=40)
    for _ in range(40):
        queue.enter()
    with pytest.raises(CapacityError) as refused:
        queue.enter()
    assert refused.value.retry_after_s == 10.0, "no request has left the queue yet"
    now = time.monotonic()
    queue.journal.left_at.extend(now - 9 + i / 2 for i in range(18))  # about two per second
    with pytest.raises(CapacityError) as refused:
        queue.enter()
    assert refused.value.retry_after_s == pytest.approx(40 / 1.8, rel=0.05)
    queue.journal.left_at.extend(now - 1 + i / 300 for i in range(300))  # only the last 256 count, within 0.85 s
    with pytest.raises(CapacityError) as refused:
        queue.enter()
    assert refused.value.retry_after_s == 1.0, "300 leave per second, but no client should retry within a second"


def test_an_answer_no_longer_counts_for_its_caller_after_its_last_token() -> None:
    queue = Queue(max_num_waiting=10)
    caller = Caller(None, Usage("team", RateLimits(max_concurrent_answers=2)))
    ticket, _ = queue.enter(best_of=2, caller=caller)
    with pytest.raises(RateLimited):
        queue.enter(caller=caller)
    with pytest.raises(CapacityError):
        queue.enter(best_of=9)
    ticket.end(7)
    ticket.end(7)
    queue.enter(caller=caller)
    ticket.close()
    assert caller.usage.num_open_answers == 1


def test_a_refused_request_does_not_count_for_its_caller() -> None:
    queue = Queue()
    caller = Caller(None, Usage("team", RateLimits(max_concurrent_answers=1)))
    for _ in range(5):
        with pytest.raises(PermissionDenied):  # it exceeds the limit by itself
            queue.enter(best_of=2, caller=caller)
    queue.enter(caller=caller)
    for _ in range(5):
        with pytest.raises(RateLimited):
            queue.enter(caller=caller)
    assert caller.usage.num_open_answers == 1


def test_draining_refuses_new_requests_and_waits_for_running_ones() -> None:
    async def test() -> None:
        queue = Queue()
        ticket, _ = queue.enter()
        queue.admission.refuse_all()
        drain = asyncio.create_task(queue.admission.wait_closed(30.0))
        with pytest.raises(Draining):
            queue.enter()
        ticket.end(3)
        await asyncio.sleep(0.02)
        assert not drain.done(), "the end of the answer may be on its way"
        ticket.close()
        assert await drain == 0
        assert await queue.admission.wait_closed(30.0) == 0

    asyncio.run(test())


def test_draining_ends_at_its_time_limit() -> None:
    async def test() -> None:
        queue = Queue()
        queue.enter()
        assert await queue.admission.wait_closed(0.01) == 1

    asyncio.run(test())
