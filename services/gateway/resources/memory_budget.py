"""`MemoryBudget`: limits the memory that all open requests together take. Runs in the event loop.

Whatever is large is counted before it is read, computed or encoded: bodies, embeddings, log-probabilities, logits. What
does not fit waits for a while: the clients in turns, and of each client first those that hold a part already, then the
others in order of arrival.

A body is counted as it arrives, so it may hold a part of what it needs and wait for more. None waits if those that do
hold so much together that they would wait for each other. This does not see what a call holds in another `HeldMemory`,
such as its body while it reserves its log-probabilities: two calls that wait for each other so do until
`max_wait_s` ends the wait of one. While requests of the same client get memory one after another, the others wait on.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from services.common.errors import CapacityError, InvalidRequest
from services.common.fairness.client_turns import Client
from services.common.fairness.kept_room import KEPT_PARTS, may_wait, refusal
from services.common.shared_counts import Counts

KEY = "gateway.max_held_bytes"
POLL_S = 0.05  # how often those who wait look what other processes have given back
SMALL_BYTES = 4096  # of a body or message, with what is made of it: so much does not wait, while all such hold little
TINY_BYTES = 1024  # the same of an abort's, which must come through for the others to end: they may hold twice as much
SMALL_PARTS = 16  # so much of the budget may be held by small ones
BYTES_PER_BODY_BYTE = 4  # of a body or message: itself, the objects that are made of it, and the prompt

Place = tuple[int, asyncio.Future[None]]  # the bytes that a request waits for; done as soon as it holds them


class MemoryBudget:
    """One for a gateway. The last part is kept for clients that hold nothing, or little."""

    def __init__(
        self, max_bytes: int, max_wait_s: float = 0.0, max_waiting: int = 0, counts: Counts | None = None
    ) -> None:
        """`max_wait_s`: how long a request may wait for memory while none of its client gets any; `max_waiting`: how
        many may wait at once.

        `counts`: those of all processes, for whose sum the limits are; None: this is the only one.
        """
        counts = counts or Counts()
        self.max_bytes = max_bytes
        self._held, self._held_waiting = counts.gauge("held_bytes"), counts.gauge("held_waiting")
        self._held_by_waiting = counts.gauge("held_by_waiting")  # bytes of those who wait for more
        self._held_small = counts.gauge("held_small")
        self._poll_s = POLL_S if counts.is_shared else None
        self._next_poll_s = 0.0  # on `time.monotonic`
        self._max_wait_s = max_wait_s
        self._max_waiting = max_waiting
        self._held_of = Counter[Client]()  # a client that holds nothing has no entry
        self._waiting: dict[Client, deque[Place]] = {}  # in the order of their turns; no deque is empty
        self._granted_s = dict[Client, float]()  # on `time.monotonic`: when one of those was last granted
        self.reclaim: Callable[[int], None] | None = None  # frees about so many bytes of what is kept without need

    @property
    def num_held(self) -> int:
        """Bytes that are held, also by other processes."""
        return self._held.total

    @property
    def num_waiting(self) -> int:
        """How many requests wait for memory, also in other processes."""
        return self._held_waiting.total

    @property
    def is_wanted_elsewhere(self) -> bool:
        """Whether requests of other processes wait for memory."""
        return self._held_waiting.others > 0

    def add(self, client: Client, num_bytes: int) -> None:
        """Counts what a client holds more, or less, and lets those go on who wait for it."""
        self._held.add(num_bytes)
        self._held_of[client] += num_bytes
        if not self._held_of[client]:
            del self._held_of[client]
        if self._waiting and num_bytes < 0:
            self._grant()

    def has_room_for_small(self, num_bytes: int, num_more: int) -> bool:
        """Whether a request may hold so many bytes, of them so many more, without a wait."""
        if num_bytes > SMALL_BYTES:
            return False
        parts = SMALL_PARTS // 2 if num_bytes <= TINY_BYTES else SMALL_PARTS
        return self._held_small.total + num_more <= self.max_bytes // parts

    def add_small(self, num_bytes: int) -> None:
        """Counts how much of what is held, more or less, small ones hold."""
        self._held_small.add(num_bytes)

    async def take(self, client: Client, num_bytes: int, what: str, num_held: int = 0, num_small: int = 0) -> None:
        """Adds so many bytes for `what`, if need be after a while. Raises `CapacityError`.

        `num_held`: bytes that the same request holds already; `num_small`: so many of them without having waited.
        """
        reason = self.refusal(client, num_bytes, what)
        is_first = num_held > num_small
        if reason is None and (is_first or client not in self._waiting):
            self.add(client, num_bytes)
            return
        reason = reason or f"other requests of this client wait for memory ({KEY})"
        if self.num_waiting >= self._max_waiting:
            raise CapacityError(f"{reason}; {self.num_waiting} requests wait already, gateway.max_held_waiting")
        num_by_waiting = self._held_by_waiting.total
        if num_held and num_by_waiting + num_held + num_bytes > self.limit_of(client):
            raise CapacityError(f"{reason}; {num_by_waiting} are held by requests that wait for more themselves")
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        places = self._waiting.setdefault(client, deque())
        (places.appendleft if is_first else places.append)((num_bytes, place))
        self._held_waiting.add(1)
        self._held_by_waiting.add(num_held)
        try:
            await self._wait_for(client, place)
        except asyncio.CancelledError:
            if place.done():
                self.add(client, -num_bytes)
            else:
                self._leave(client, num_bytes, place)
            raise
        finally:
            self._held_by_waiting.add(-num_held)
        if not place.done():
            self._leave(client, num_bytes, place)
            raise CapacityError(f"{reason}; waited for {self._max_wait_s:g} s, gateway.max_held_wait_s")

    async def _wait_for(self, client: Client, place: asyncio.Future[None]) -> None:
        """Waits until the place is granted, or none of its client's is for `max_wait_s`.

        What another process gives back nobody announces.
        """
        begin_s = time.monotonic()
        while not place.done():
            left_s = max(begin_s, self._granted_s.get(client, 0.0)) + self._max_wait_s - time.monotonic()
            if left_s <= 0:
                return
            await asyncio.wait({place}, timeout=left_s if self._poll_s is None else min(left_s, self._poll_s))
            if self._poll_s is not None and (now := time.monotonic()) >= self._next_poll_s:  # one for all who wait
                self._next_poll_s = now + self._poll_s
                self._grant()

    def refusal(self, client: Client, num_bytes: int, what: str) -> str | None:
        """Why a client may not hold so much more for `what`, also after what nobody needs is freed; None if it may."""
        reason = self._refusal(client, num_bytes, what)
        if reason is not None and self.reclaim is not None:
            self.reclaim(num_bytes)
            reason = self._refusal(client, num_bytes, what)
        return reason

    def _grant(self) -> None:
        """Lets those go on whose bytes fit now, one of each client at a time."""
        has_granted = True
        while has_granted:
            has_granted = False
            for client in list(self._waiting):
                num_bytes, place = self._waiting[client][0]
                if self._refusal(client, num_bytes, "") is None:
                    places = self._waiting.pop(client)
                    places.popleft()
                    self._held_waiting.add(-1)
                    if places:
                        self._waiting[client] = places  # at the end
                        self._granted_s[client] = time.monotonic()
                    else:
                        self._granted_s.pop(client, None)
                    self.add(client, num_bytes)
                    place.set_result(None)
                    has_granted = True

    def _leave(self, client: Client, num_bytes: int, place: asyncio.Future[None]) -> None:
        places = self._waiting[client]
        places.remove((num_bytes, place))
        self._held_waiting.add(-1)
        if not places:
            del self._waiting[client]
            self._granted_s.pop(client, None)
        self._grant()  # a smaller one may have waited behind this one

    def limit_of(self, client: Client) -> int:
        """What requests of a client may hold together with all others, unless it holds little."""
        return self.max_bytes - self.max_bytes // KEPT_PARTS if any(client) else self.max_bytes

    def _refusal(self, client: Client, num_bytes: int, what: str) -> str | None:
        """Why a client may not hold so much more for `what`; None if it may."""
        num_held = self.num_held
        if num_held + num_bytes > self.max_bytes:
            return (
                f"open requests may take {num_held} bytes of memory, {num_bytes} more for {what} would exceed "
                f"{self.max_bytes} ({KEY})"
            )
        num_own = self._held_of[client]
        if any(client) and not may_wait(self.max_bytes, num_held, num_own, num_bytes):
            held = f"{num_own} of {num_held} bytes of memory that requests may take ({KEY})"
            return refusal(held, num_bytes, self.max_bytes)
        return None


@dataclass(slots=True, eq=False)
class HeldMemory:
    """What one request holds of the budget, until `release`."""

    budget: MemoryBudget
    client: Client
    num_bytes: int = field(default=0, init=False)
    _num_small: int = field(default=0, init=False)  # of them, taken as those of a small body: past those who wait

    async def reserve(self, num_bytes: int, what: str, param: str | None = None, advice: str = "send less") -> None:
        """Holds more, if need be after a while. `what` takes the bytes, such as "logits"; `param`: the field to blame.

        Raises `InvalidRequest` if the request would hold more than it ever may, with an `advice`, and `CapacityError`
        if too little of the budget is left for this client for too long.
        """
        most = self.budget.limit_of(self.client) if self.num_bytes else self.budget.max_bytes
        if self.num_bytes + num_bytes > most:
            beside = f" beside {self.num_bytes} others" if self.num_bytes else ""
            kept = f", 1/{KEPT_PARTS} of it is kept for other clients" if most < self.budget.max_bytes else ""
            raise InvalidRequest(
                f"the request may take {num_bytes} bytes of memory for {what}{beside}, {KEY} is "
                f"{self.budget.max_bytes}{kept}: {advice}",
                param,
            )
        await self.budget.take(self.client, num_bytes, what, self.num_bytes, self._num_small)
        self._set_small(0)  # it has waited in order
        self.num_bytes += num_bytes

    async def reserve_body(self, num_bytes: int, what: str) -> None:
        """Holds more for a body or message. A small one does not wait, and so can end requests of its client that do.

        If small ones hold much together, it waits as others do.
        """
        total = self.num_bytes + num_bytes
        if self.budget.has_room_for_small(total, total - self._num_small):
            self.add(num_bytes)
            self._set_small(total)
        else:
            await self.reserve(num_bytes, what)

    def add(self, num_bytes: int) -> None:
        """Holds more of what has been made already, so it is too late to refuse it."""
        self.budget.add(self.client, num_bytes)
        self.num_bytes += num_bytes

    def try_reserve(self, num_bytes: int, what: str) -> str | None:
        """Holds more if there is room now; otherwise returns why not."""
        reason = self.budget.refusal(self.client, num_bytes, what)
        if reason is None:
            self.add(num_bytes)
        return reason

    def hand_over(self) -> HeldMemory:
        """A new one that holds what this one held."""
        other = HeldMemory(self.budget, self.client)
        other.num_bytes, self.num_bytes = self.num_bytes, 0
        other._num_small, self._num_small = self._num_small, 0
        return other

    def move_to(self, client: Client) -> None:
        """From now on it is held by requests of another client."""
        self.budget.add(client, self.num_bytes)
        self.budget.add(self.client, -self.num_bytes)
        self.client = client

    def release(self) -> None:
        """Gives back all that the request holds."""
        num_bytes, self.num_bytes = self.num_bytes, 0
        self._set_small(0)
        self.budget.add(self.client, -num_bytes)

    def _set_small(self, num_bytes: int) -> None:
        self.budget.add_small(num_bytes - self._num_small)
        self._num_small = num_bytes
