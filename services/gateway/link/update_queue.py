"""`UpdateQueue`: the sequences of one request that have new tokens, or have ended, for the request's handler.

`Turns`: when the handlers of all requests get theirs. Everything runs in the gateway's event loop.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

ROUND_SIZE = 16  # requests whose tokens are handed out in one iteration of the event loop
NUM_WAKES = 64  # tasks that wait for tokens and are woken in one; fewer would make the last tokens of a step later
ROUND_SIZE_AT_ARRIVALS = 2  # both while requests arrive, each of which needs some ten iterations to begin
ROUNDS_OF_ARRIVAL = 64  # how many are smaller after a request has arrived

Entry = TypeVar("Entry")  # of a sequence


class UpdateQueue(Generic[Entry]):
    """A queue of the sequences of a request that have updates, for the request's handler.

    The handler waits for the next one, or has all that there are passed to a function, which wakes no task. Either has
    its turn.
    """

    __slots__ = ("_can_take", "_entries", "_is_new", "_num_due", "_take", "_turns", "_waiter")

    def __init__(self, turns: Turns) -> None:
        """`turns`: those of all requests."""
        self._turns = turns
        self._entries: list[Entry] = []  # each entry at most once
        self._num_due = 0  # of them, that `next` may return in this turn
        self._is_new = True  # whether it has had no turn
        self._waiter: asyncio.Future[None] | None = None
        self._take: Callable[[list[Entry]], bool] | None = None  # given while `forward` runs
        self._can_take: Callable[[], bool] = bool

    def put(self, entry: Entry) -> None:
        """Adds an entry that is not in the queue."""
        entries = self._entries
        entries.append(entry)
        if self._take is not None:
            if len(entries) == 1:
                # Its other updates of this step come first.
                self._turns.forwards.add(self._deliver, is_first=self._is_new)
        elif self._waiter is not None and len(self._entries) == 1:
            self._turns.wakes.add(self._wake, is_first=self._is_new)

    async def next(self) -> Entry:
        """Waits for an entry with updates. For one caller at a time."""
        if not self._num_due:
            await self._turn()
        self._num_due -= 1
        return self._entries.pop(0)

    async def _turn(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        if self._entries:
            self._turns.wakes.add(self._wake, is_first=self._is_new)
        try:
            await self._waiter
        finally:
            self._waiter = None
        self._num_due = len(self._entries)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done() and self._entries:
            self._is_new = False
            self._waiter.set_result(None)

    async def forward(self, take: Callable[[list[Entry]], bool], can_take: Callable[[], bool]) -> None:
        """Passes entries with updates to `take`, all that there are at once, until `take` says that these were the last
        ones or raises, as this then does. Returns as well when there are some and `can_take` is false.

        Like `next` for one caller at a time. `take` runs in the event loop, but not in the task that called this.
        """
        self._take, self._can_take = take, can_take
        self._waiter = waiter = asyncio.get_running_loop().create_future()
        try:
            self._deliver()
            await waiter
        finally:
            self._take = None

    def _deliver(self) -> None:
        # In locals first: Python calls a method faster than what a slot holds.
        waiter, take, can_take, entries = self._waiter, self._take, self._can_take, self._entries
        if take is None or waiter is None or waiter.done():
            return  # `forward` has ended; what is in the queue stays there
        if not entries:
            return
        if not can_take():
            waiter.set_result(None)
            return
        self._is_new = False
        self._entries, self._num_due = [], 0
        try:
            if not take(entries):
                waiter.set_result(None)
        except Exception as error:
            waiter.set_exception(error)

    def leave(self, entry: Entry) -> None:
        """Called when the last chunk of an answer has been made."""


class Turns:
    """The rounds of all requests whose tokens are forwarded, and of all those whose tasks are woken."""

    def __init__(self) -> None:
        self.forwards, self.wakes = Rounds(ROUND_SIZE), Rounds(NUM_WAKES, is_wake=True)

    def note_arrival(self) -> None:
        """Called when a request has arrived: others may be behind it."""
        self.forwards.shrink()
        self.wakes.shrink()


class Rounds:
    """Hands out the tokens of a step, to some requests in each iteration of the event loop.

    What is written in an iteration leaves at its end, so the first tokens of a step need not wait for the last. And if
    the next step is read meanwhile, requests that have not had their turn get the tokens of both at once: so a gateway
    keeps up that has too little time for an event to each request and step. Iterations are shorter while requests
    arrive: the many that come at once would otherwise wait for most of the tokens of those that run. A request's first
    turn comes before all others', so that its first token does not wait for them either.
    """

    def __init__(self, size: int, *, is_wake: bool = False) -> None:
        """`size`: how many have their turn in an iteration.

        `is_wake`: the first ones have it when they are added, since a task that is woken runs later anyway.
        """
        self._size = size
        self._is_wake = is_wake
        self._num_left = size if is_wake else 0  # how many more need not wait for a later iteration
        self._first: deque[Callable[[], None]] = deque()  # of requests that have had no turn
        self._waiting: deque[Callable[[], None]] = deque()
        self._is_due = False  # whether the loop will call `_run`
        self._num_small = 0  # rounds to come that are smaller

    def shrink(self) -> None:
        """Makes the next rounds smaller."""
        self._num_small = ROUNDS_OF_ARRIVAL

    def add(self, hand_out: Callable[[], None], *, is_first: bool = False) -> None:
        """Calls `hand_out` in its turn. `is_first`: its request has had none."""
        if self._num_left > 0:
            self._num_left -= 1
            hand_out()
        else:
            (self._first if is_first else self._waiting).append(hand_out)
        if not self._is_due:
            self._schedule()

    def _schedule(self) -> None:
        self._is_due = True
        asyncio.get_running_loop().call_soon(self._run)

    def _run(self) -> None:
        first, waiting, size = self._first, self._waiting, self._size
        if self._num_small > 0:
            self._num_small -= 1
            size = ROUND_SIZE_AT_ARRIVALS
        num_turns = min(len(first) + len(waiting), size)
        try:
            for _ in range(num_turns):
                (first or waiting).popleft()()
        finally:
            self._num_left = size - num_turns if self._is_wake else 0
            self._is_due = False
            if first or waiting:
                self._schedule()
