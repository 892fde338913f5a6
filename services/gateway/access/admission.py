"""`Admission`: whether one more request may come in, and when to ask again if not.

The queue is bounded over what has not taken part in a step yet, by answers and by prompt tokens; what runs is the
scheduler's business. Refusals cost nothing: most are made before the request is tokenized.
"""

from __future__ import annotations

import asyncio
import time

from services.common.errors import CapacityError, Draining
from services.gateway.access.access import Caller
from services.gateway.link.journal import Journal
from services.gateway.request import GenerationRequest

MIN_RETRY_S = 1.0
MAX_RETRY_S = 60.0
RATE_WINDOW_S = 10.0  # over which the queue's pace is measured


class Admission:
    """One queue for all callers, and each caller's own limits. Runs in the event loop."""

    def __init__(self, journal: Journal, max_num_waiting: int, max_num_waiting_tokens: int) -> None:
        self._journal = journal
        self._max_num_waiting = max_num_waiting  # answers
        self._max_num_waiting_tokens = max_num_waiting_tokens  # of their prompts
        self._num_preparing = 0  # requests that are being read and tokenized
        self.num_open = 0  # requests whose clients have not been answered yet
        self._all_closed = asyncio.Event()
        self._all_closed.set()
        self._is_draining = False

    @property
    def is_draining(self) -> bool:
        """Whether new requests are refused, for good."""
        return self._is_draining

    def open(self, caller: Caller) -> Ticket:
        """Lets a request come in. Raises `Draining`, `CapacityError` or `RateLimited`; its client closes the ticket."""
        if self._is_draining:
            raise Draining("the gateway is about to stop and takes no new requests")
        self.check_queue(1, 1)  # at least
        caller.usage.open_request()
        self._num_preparing += 1
        self.num_open += 1
        self._all_closed.clear()
        return Ticket(self, caller)

    def check_queue(self, num_answers: int, num_tokens: int) -> None:
        """Raises `CapacityError` if so many more do not fit. Tokens never refuse the only one that waits."""
        num_waiting = self._journal.num_waiting + self._num_preparing
        if num_waiting + num_answers > self._max_num_waiting:
            raise CapacityError(
                f"{num_waiting} answers are waiting to be started, with {num_answers} more the limit of "
                f"{self._max_num_waiting} is exceeded",
                retry_after_s=self._retry_after_s(),
            )
        num_waiting_tokens = self._journal.num_waiting_tokens
        if num_waiting_tokens and num_waiting_tokens + num_tokens > self._max_num_waiting_tokens:
            raise CapacityError(
                f"{num_waiting_tokens} prompt tokens are waiting to be computed, with {num_tokens} more the limit of "
                f"{self._max_num_waiting_tokens} is exceeded",
                retry_after_s=self._retry_after_s(),
            )

    def refuse_all(self) -> None:
        """From now on no request comes in."""
        self._is_draining = True

    async def wait_closed(self, timeout_s: float) -> int:
        """Waits for the requests that are in; returns how many are left after `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._all_closed.wait()
        except TimeoutError:
            pass
        return self.num_open

    def note_prepared(self) -> None:
        """A ticket's request is in the journal, or will never be."""
        self._num_preparing -= 1

    def note_closed(self) -> None:
        """A ticket's request is done with."""
        self.num_open -= 1
        if not self.num_open:
            self._all_closed.set()

    def _retry_after_s(self) -> float:
        """How long the queue takes at its pace of the last seconds."""
        now_s, left = time.monotonic(), self._journal.left_at
        while left and left[0] < now_s - RATE_WINDOW_S:
            left.popleft()
        if not left:
            return RATE_WINDOW_S
        is_whole = len(left) == left.maxlen  # else nothing else has left within the window
        window_s = max(now_s - left[0], 1e-3) if is_whole else RATE_WINDOW_S
        return min(max(MIN_RETRY_S, self._journal.num_waiting * window_s / len(left)), MAX_RETRY_S)


class Ticket:
    """One request's part of all limits, from its arrival until it is answered."""

    def __init__(self, admission: Admission, caller: Caller) -> None:
        self._admission = admission
        self._caller = caller
        self._num_answers = 1
        self._is_preparing = True
        self._has_ended = False
        self._is_closed = False

    def admit(self, request: GenerationRequest) -> None:
        """The request is known and about to wait. Raises `CapacityError`, `RateLimited` or `PermissionDenied`."""
        usage = self._caller.usage
        self._end_preparation()
        self._admission.check_queue(request.best_of, request.best_of * len(request.prompt_token_ids))
        usage.check_size(request.best_of)
        usage.add_answers(request.best_of - 1)
        self._num_answers = request.best_of
        usage.add_tokens(len(request.prompt_token_ids))

    def end(self, num_output_tokens: int) -> None:
        """All answers are complete; they may be on their way to the client still. Twice is once."""
        if not self._has_ended:
            self._has_ended = True
            self._caller.usage.close_answers(self._num_answers)
            self._caller.usage.add_tokens(num_output_tokens)

    def close(self) -> None:
        """Nothing is left to do for the request. Twice is once."""
        self.end(0)
        self._end_preparation()
        if not self._is_closed:
            self._is_closed = True
            self._admission.note_closed()

    def _end_preparation(self) -> None:
        if self._is_preparing:
            self._is_preparing = False
            self._admission.note_prepared()
