"""`Admission`: decides whether one more request is accepted, and when a refused client should retry.

The queue of answers that have not taken part in a step yet is limited, by number of answers and of prompt tokens.
Running answers are left to the scheduler. Refusals are cheap: most come before the request is tokenized.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterator

from services.common.errors import CapacityError, Draining
from services.common.fairness import KEPT_PARTS, Client, may_wait, refusal
from services.common.shared_counts import Counts
from services.gateway.access.access import Caller
from services.gateway.link.journal import Journal
from services.gateway.request.generation_request import GenerationRequest

MIN_RETRY_S = 1.0
MAX_RETRY_S = 60.0
RATE_WINDOW_S = 10.0  # period over which the speed of the queue is measured


class Admission:
    """The limits of the common queue and of each caller. Runs in the event loop."""

    def __init__(
        self, journal: Journal, max_num_waiting: int, max_num_waiting_tokens: int, counts: Counts | None = None
    ) -> None:
        """`counts`: those of all processes, for whose sum the limits are; None: this is the only one."""
        self._journal = journal
        self._max_num_waiting = max_num_waiting  # answers
        self._max_num_waiting_tokens = max_num_waiting_tokens  # prompt tokens of these answers
        self._preparing = (counts or Counts()).gauge("preparing")  # answers to requests being read and tokenized
        self._preparing_of = Counter[Client]()  # the same by client; a client without has no entry
        self.num_open = 0  # requests whose answers are not complete
        self._all_closed = asyncio.Event()
        self._all_closed.set()
        self._is_draining = False

    @property
    def is_draining(self) -> bool:
        """Whether new requests are refused because the gateway is about to stop."""
        return self._is_draining

    @contextlib.contextmanager
    def room(self, caller: Caller, num_answers: int) -> Iterator[Callable[[int], None]]:
        """A context in which the queue has room for so many answers of a batch, which are given up one after another by
        what it gives: otherwise each of many batches would get a part of the queue, and all would be refused. One that
        is larger than the queue joins it as others leave.

        Raises `CapacityError`.
        """
        if num_answers > self._max_num_waiting - self._max_num_waiting // KEPT_PARTS:
            num_answers = 1
        self.check_queue(caller, num_answers, 1)
        num_left = num_answers

        def give_up(count: int) -> None:
            nonlocal num_left
            count = min(count, num_left)
            num_left -= count
            self._count_preparing(caller, -count)

        self._count_preparing(caller, num_answers)
        try:
            yield give_up
        finally:
            give_up(num_left)

    def open(self, caller: Caller, num_answers: int = 1) -> Ticket:
        """Accepts a request for so many answers. Raises `Draining`, `CapacityError` or `RateLimited`. The caller closes
        the ticket.
        """
        if self._is_draining:
            raise Draining("the gateway is about to stop and accepts no new requests")
        self.check_queue(caller, num_answers, 1)  # at least one token
        caller.usage.open_request()
        self._count_preparing(caller, num_answers)
        self.num_open += 1
        self._all_closed.clear()
        return Ticket(self, caller, num_answers)

    def check_queue(self, caller: Caller, num_answers: int, num_tokens: int) -> None:
        """Raises `CapacityError` if these do not fit. The limit of tokens does not apply to an empty queue.

        The last part of the queue is kept for clients that have nothing else in it, or little. Callers whose client is
        unknown count as one client that may use all of it. What a client has itself is what it has in this process.
        """
        num_waiting = self._journal.waiting.total + self._preparing.total
        num_own, num_own_tokens = self._journal.waiting_of(caller.client_id)
        num_own += self._preparing_of[caller.client_id]
        if num_waiting + num_answers > self._max_num_waiting:
            raise CapacityError(
                f"{num_waiting} answers are waiting to start, {num_answers} more would exceed the limit of "
                f"{self._max_num_waiting}",
                retry_after_s=self._retry_after_s(),
            )
        if caller.client and not may_wait(self._max_num_waiting, num_waiting, num_own, num_answers):
            raise self._full_of_one(f"{num_own} of {num_waiting} waiting answers", num_answers, self._max_num_waiting)
        num_waiting_tokens = self._journal.waiting_tokens.total
        if num_waiting_tokens and num_waiting_tokens + num_tokens > self._max_num_waiting_tokens:
            raise CapacityError(
                f"{num_waiting_tokens} prompt tokens are waiting, {num_tokens} more would exceed the limit of "
                f"{self._max_num_waiting_tokens}",
                retry_after_s=self._retry_after_s(),
            )
        limit = self._max_num_waiting_tokens
        if caller.client and not may_wait(limit, num_waiting_tokens, num_own_tokens, num_tokens):
            what = f"{num_own_tokens} of {num_waiting_tokens} waiting prompt tokens"
            raise self._full_of_one(what, num_tokens, limit)

    def refuse_all(self) -> None:
        """Refuses all requests from now on."""
        self._is_draining = True

    async def wait_closed(self, timeout_s: float) -> int:
        """Waits until all open requests are closed; returns how many are still open after `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._all_closed.wait()
        except TimeoutError:
            pass
        return self.num_open

    def note_prepared(self, caller: Caller, num_answers: int) -> None:
        """Counts that the answers to a ticket's request are in the journal, or have ended before."""
        self._count_preparing(caller, -num_answers)

    def _count_preparing(self, caller: Caller, count: int) -> None:
        self._preparing.add(count)
        self._preparing_of[caller.client_id] += count
        if not self._preparing_of[caller.client_id]:
            del self._preparing_of[caller.client_id]

    def note_closed(self) -> None:
        """Counts that a ticket's request has ended."""
        self.num_open -= 1
        if not self.num_open:
            self._all_closed.set()

    def _full_of_one(self, what: str, num_more: int, limit: int) -> CapacityError:
        return CapacityError(refusal(what, num_more, limit), retry_after_s=self._retry_after_s())

    def _retry_after_s(self) -> float:
        """Seconds until the present queue is empty, at its speed of the last seconds."""
        now_s, left = time.monotonic(), self._journal.left_at
        while left and left[0] < now_s - RATE_WINDOW_S:
            left.popleft()
        if not left:
            return RATE_WINDOW_S
        is_whole = len(left) == left.maxlen  # if not full, it holds all that left within the window
        window_s = max(now_s - left[0], 1e-3) if is_whole else RATE_WINDOW_S
        return min(max(MIN_RETRY_S, self._journal.waiting.own * window_s / len(left)), MAX_RETRY_S)


class Ticket:
    """What one request counts towards all limits, from its arrival until its end."""

    def __init__(self, admission: Admission, caller: Caller, num_preparing: int) -> None:
        self._admission = admission
        self._caller = caller
        self._num_preparing = num_preparing  # answers that the queue has room for while the request is read
        self._num_answers = 1  # that the caller's usage has open because of it
        self._is_preparing = True
        self._has_ended = False
        self._is_closed = False
        self._at_close: list[Callable[[], None]] = []

    def admit(self, request: GenerationRequest) -> None:
        """Counts the request's answers and tokens, before it joins the queue.

        Raises `CapacityError`, `RateLimited` or `PermissionDenied`.
        """
        usage = self._caller.usage
        self._end_preparation()
        self._admission.check_queue(self._caller, request.best_of, request.best_of * len(request.spec.prompt_token_ids))
        usage.check_size(request.best_of)
        usage.add_answers(request.best_of - 1)
        self._num_answers = request.best_of
        usage.add_tokens(len(request.spec.prompt_token_ids))

    def at_close(self, callback: Callable[[], None]) -> None:
        """Calls `callback` when the request has ended."""
        self._at_close.append(callback)

    def end(self, num_output_tokens: int) -> None:
        """Counts the answers as complete, though the client may not have them yet. Does nothing the second time."""
        if not self._has_ended:
            self._has_ended = True
            self._caller.usage.close_answers(self._num_answers)
            self._caller.usage.add_tokens(num_output_tokens)

    def close(self) -> None:
        """Counts the request as ended. Does nothing the second time."""
        self.end(0)
        self._end_preparation()
        if not self._is_closed:
            self._is_closed = True
            self._admission.note_closed()
            for callback in self._at_close:
                callback()

    def _end_preparation(self) -> None:
        if self._is_preparing:
            self._is_preparing = False
            self._admission.note_prepared(self._caller, self._num_preparing)
