"""`MemoryBudget`: limits the memory that all open requests together take. Runs in the event loop.

Whatever is large is counted before it is read, computed or encoded: bodies, embeddings, log-probabilities, logits. What
does not fit waits for a while: the clients in turns, and of each client first those that hold a part already, then the
others in order of arrival. While requests of the same client get memory one after another, the others wait on.

Requests that hold a part and wait for more must not wait for each other. A request is *settled* when it holds all that
it needs; it ends without anybody's help. Of those that are not, bodies may have a part of the budget (`_BODIES`), and
neither they nor what is made of them its last quarter (`_LAST_PARTS`). Beyond these lines one body may go until it has
come, and one request that needs more than its body, until it is settled or gone (`_Last`); and one of each of a client
that holds little. So there is always one that goes on, unless it needs more than such a last part: then it waits for
`max_wait_s` at most.
"""

from __future__ import annotations

import asyncio
import enum
import time
from collections import Counter, deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field

from services.common.errors import CapacityError, InvalidRequest
from services.common.fairness import KEPT_PARTS, Client, is_little, may_wait, refusal
from services.common.shared_counts import Count, Counts

KEY = "gateway.max_held_bytes"
POLL_S = 0.05  # how often those who wait look what other processes have given back
SMALL_BYTES = 4096  # of a body or message, with what is made of it: so much does not wait, while all such hold little
TINY_BYTES = 1024  # the same of an abort's, which must come through for the others to end: they may hold twice as much
SMALL_PARTS = 16  # so much of the budget may be held by small ones
BYTES_PER_BODY_BYTE = 4  # of a body or message: itself, the objects that are made of it, and the prompt
BYTES_PER_BODY_COMMA = 32  # of the JSON of a large body, beside that: each number of a list is an object of its own
_LAST_PARTS = 4  # the last part in so many of what is not settled is for one request
_BODIES = 2 / 8, 3 / 8, 5 / 8  # of the budget, for bodies: of any client, of one that holds little, with the last one


class Purpose(enum.Enum):
    """What memory is for."""

    BODY = "bodies"  # that arrive, or are being read
    FEATURE = "features"  # what is made of bodies


class _Line(enum.Enum):
    """Where a request would be that got what it asks for."""

    BEFORE = enum.auto()
    LAST = enum.auto()  # where one may be
    BEYOND = enum.auto()


@dataclass(slots=True, eq=False)
class _Place:
    """One that waits."""

    holder: HeldMemory
    num_bytes: int
    holds_a_part: bool
    granted: asyncio.Future[None]  # done as soon as the bytes are held


@dataclass(slots=True)
class _Last:
    """Who has gone beyond the line."""

    count: Count  # in all processes
    holder: HeldMemory | None = None  # in this one

    def may_be(self, holder: HeldMemory) -> bool:
        return self.holder is holder or not self.count.total

    def set(self, holder: HeldMemory | None) -> None:
        self.count.add((holder is not None) - (self.holder is not None))
        self.holder = holder


@dataclass(slots=True)
class _Queue:
    """Those that wait for memory for one purpose."""

    waiting: dict[Client, deque[_Place]] = field(default_factory=dict)  # in the order of their turns; no deque is empty

    def put(self, place: _Place, *, is_last: bool) -> None:
        """Before those of its client that hold nothing, if it holds a part itself; before all if it is the last one."""
        places = self.waiting.setdefault(place.holder.client, deque())
        if is_last:
            places.appendleft(place)
        else:
            places.insert(sum(each.holds_a_part for each in places) if place.holds_a_part else len(places), place)


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
        self._held_small = counts.gauge("held_small")
        self._unsettled = counts.gauge("held_unsettled")  # bytes of requests that may need more
        self._bodies = counts.gauge("held_bodies")  # of these, of bodies
        self._queues = {each: _Queue() for each in Purpose}
        self._last = {  # by purpose, and by whether its client holds little
            (each, has_little): _Last(counts.gauge(f"held_last_{each.value}_{'little' if has_little else 'any'}"))
            for each in Purpose
            for has_little in (False, True)
        }
        self._poll_s = POLL_S if counts.is_shared else None
        self._next_poll_s = 0.0  # on `time.monotonic`
        self._max_wait_s = max_wait_s
        self._max_waiting = max_waiting
        self._held_of = Counter[Client]()  # a client that holds nothing has no entry
        self._waiting_of = Counter[Client]()  # places; likewise
        self._granted_s = dict[Client, float]()  # on `time.monotonic`: when one of those that wait last got memory
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
        if num_bytes < 0 and self._waiting_of:
            self._grant()

    def add_unsettled(self, num_bytes: int, num_of_body: int) -> None:
        """Counts how much of what is held belongs to requests that are not settled, more or less."""
        self._unsettled.add(num_bytes)
        self._bodies.add(num_of_body)

    def note_settled(self, holder: HeldMemory, num_bytes: int, num_of_body: int) -> None:
        """Lets those go on who wait for one that is settled now, or gone, and had so much that was not settled."""
        was_last = False
        for last in self._last.values():
            if last.holder is holder:
                last.set(None)
                was_last = True
        if num_bytes:
            self.add_unsettled(-num_bytes, -num_of_body)
        if (num_bytes or was_last) and self._waiting_of:
            self._grant()

    def note_body_ended(self, holder: HeldMemory) -> None:
        """Lets another body go beyond the line: this one needs no more for itself."""
        for (purpose, _), last in self._last.items():
            if purpose is Purpose.BODY and last.holder is holder:
                last.set(None)
                if self._waiting_of:
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

    async def take(
        self, holder: HeldMemory, num_bytes: int, what: str, purpose: Purpose, *, holds_a_part: bool
    ) -> None:
        """Gives so many bytes for `what`, if need be after a while. Raises `CapacityError`.

        holds_a_part: whether the same request has waited for some already, or was first in turn
        """
        client, queue = holder.client, self._queues[purpose]
        reason = self.refusal(holder, num_bytes, what, purpose)
        if reason is None and (holds_a_part or client not in queue.waiting):
            self.give(holder, num_bytes, purpose)
            return
        reason = reason or f"other requests of this client wait for memory ({KEY})"
        num_waiting, num_own = self.num_waiting, self._waiting_of[client]
        if num_waiting >= self._max_waiting:
            raise CapacityError(f"{reason}; {num_waiting} requests wait already, gateway.max_held_waiting")
        if any(client) and not may_wait(self._max_waiting, num_waiting, num_own, 1):
            places = refusal(f"{num_own} of {num_waiting} requests that wait", 1, self._max_waiting)
            raise CapacityError(f"{reason}; {places} (gateway.max_held_waiting)")
        place = _Place(holder, num_bytes, holds_a_part, asyncio.get_running_loop().create_future())
        queue.put(place, is_last=any(each.holder is holder for each in self._last.values()))
        self._count_waiting(client, 1)
        try:
            with holder.waiting():
                await self._wait_for(place)
        except BaseException:
            if not place.granted.done():
                self._leave(queue, place)
            else:
                holder.give_back(num_bytes)
            raise
        if not place.granted.done():
            self._leave(queue, place)
            raise CapacityError(f"{reason}; waited for {self._max_wait_s:g} s, gateway.max_held_wait_s")

    async def _wait_for(self, place: _Place) -> None:
        """Waits until the place is granted, or none of its client's is for `max_wait_s`.

        What another process gives back nobody announces.
        """
        begin_s, client = time.monotonic(), place.holder.client
        while not place.granted.done():
            left_s = max(begin_s, self._granted_s.get(client, 0.0)) + self._max_wait_s - time.monotonic()
            if left_s <= 0:
                return
            await asyncio.wait({place.granted}, timeout=left_s if self._poll_s is None else min(left_s, self._poll_s))
            if self._poll_s is not None and (now := time.monotonic()) >= self._next_poll_s:  # one for all who wait
                self._next_poll_s = now + self._poll_s
                self._grant()

    def refusal(self, holder: HeldMemory, num_bytes: int, what: str, purpose: Purpose | None) -> str | None:
        """Why one may not hold so much more for `what`, also after what nobody needs is freed; None if it may.

        purpose: None if it waits for nothing and is settled
        """
        reason = self._refusal(holder, num_bytes, what, purpose)
        if reason is not None and self.reclaim is not None:
            self.reclaim(num_bytes)
            reason = self._refusal(holder, num_bytes, what, purpose)
        return reason

    def give(self, holder: HeldMemory, num_bytes: int, purpose: Purpose) -> None:
        """Counts what `refusal` allows."""
        if self._line(holder, num_bytes, purpose) is _Line.LAST:
            self._last[purpose, self._has_little(holder, num_bytes)].set(holder)
        if holder.client in self._waiting_of:
            self._granted_s[holder.client] = time.monotonic()
        holder.note_given(num_bytes, purpose)

    def _grant(self) -> None:
        """Lets those go on whose bytes fit now, one of each client at a time."""
        has_granted = True
        while has_granted:
            has_granted = False
            for purpose in (Purpose.FEATURE, Purpose.BODY):
                queue = self._queues[purpose]
                for client in list(queue.waiting):
                    place = queue.waiting[client][0]
                    if self._refusal(place.holder, place.num_bytes, "", purpose) is None:
                        places = queue.waiting.pop(client)
                        places.popleft()
                        if places:
                            queue.waiting[client] = places  # at the end
                        self._count_waiting(client, -1)
                        self.give(place.holder, place.num_bytes, purpose)
                        place.granted.set_result(None)
                        has_granted = True

    def _leave(self, queue: _Queue, place: _Place) -> None:
        client = place.holder.client
        queue.waiting[client].remove(place)
        if not queue.waiting[client]:
            del queue.waiting[client]
        self._count_waiting(client, -1)
        self._grant()  # a smaller one may have waited behind this one

    def _count_waiting(self, client: Client, count: int) -> None:
        self._held_waiting.add(count)
        self._waiting_of[client] += count
        if not self._waiting_of[client]:
            del self._waiting_of[client]
            self._granted_s.pop(client, None)

    def limit_of(self, client: Client) -> int:
        """What requests of a client may hold together with all others, unless it holds little."""
        return self.max_bytes - self.max_bytes // KEPT_PARTS if any(client) else self.max_bytes

    def _refusal(self, holder: HeldMemory, num_bytes: int, what: str, purpose: Purpose | None) -> str | None:
        """Why one may not hold so much more for `what`; None if it may."""
        num_held, client = self.num_held, holder.client
        if num_held + num_bytes > self.max_bytes:
            return (
                f"open requests may take {num_held} bytes of memory, {num_bytes} more for {what} would exceed "
                f"{self.max_bytes} ({KEY})"
            )
        num_own = self._held_of[client]
        if any(client) and not may_wait(self.max_bytes, num_held, num_own, num_bytes):
            held = f"{num_own} of {num_held} bytes of memory that requests may take ({KEY})"
            return refusal(held, num_bytes, self.max_bytes)
        if purpose is None or (line := self._line(holder, num_bytes, purpose)) is _Line.BEFORE:
            return None
        if line is _Line.LAST and self._last[purpose, self._has_little(holder, num_bytes)].may_be(holder):
            return None
        return (
            f"requests that are being read take {self._unsettled.total} of {num_held} bytes of memory, and need the "
            f"rest of {self.max_bytes} ({KEY}) before {num_bytes} more for {what}"
        )

    def _line(self, holder: HeldMemory, num_bytes: int, purpose: Purpose) -> _Line:
        """Where one is that holds so many bytes more."""
        is_body, num_unsettled = purpose is Purpose.BODY, self._unsettled.total
        if is_body and num_unsettled == holder.num_unsettled:
            return _Line.BEFORE  # it is the only one
        num_held, has_little = self.num_held, self._has_little(holder, num_bytes)
        limit = self.max_bytes if has_little else self.limit_of(holder.client)
        leaves_last_part = num_held + num_bytes <= limit - (limit - num_held + num_unsettled) // _LAST_PARTS
        if not is_body:
            return _Line.BEFORE if leaves_last_part else _Line.LAST
        of_any, of_little, with_last = (int(part * self.max_bytes) for part in _BODIES)
        num_of_bodies = self._bodies.total + num_bytes
        if not leaves_last_part or num_of_bodies > with_last:
            return _Line.BEYOND
        return _Line.BEFORE if num_of_bodies <= (of_little if has_little else of_any) else _Line.LAST

    def _has_little(self, holder: HeldMemory, num_more: int) -> bool:
        """Whether its client may use what is kept for those that hold little."""
        return any(holder.client) and is_little(self.max_bytes, self._held_of[holder.client], num_more)


@dataclass(slots=True, eq=False)
class HeldMemory:
    """What one request holds of the budget, until `release`."""

    budget: MemoryBudget
    client: Client
    waiting: Callable[[], AbstractContextManager[None]] = nullcontext  # entered while it waits; may end the wait
    num_bytes: int = field(default=0, init=False)
    num_unsettled: int = field(default=0, init=False)  # of them, while the request may need more
    _num_of_body: int = field(default=0, init=False)  # of these, of its body
    _num_small: int = field(default=0, init=False)  # of all, taken as those of a small body: past those who wait

    async def reserve(
        self,
        num_bytes: int,
        what: str,
        param: str | None = None,
        advice: str = "send less",
        purpose: Purpose = Purpose.FEATURE,
    ) -> None:
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
        await self.budget.take(self, num_bytes, what, purpose, holds_a_part=self.num_bytes > self._num_small)
        self._set_small(0)  # it has waited in order

    async def reserve_body(self, num_bytes: int, what: str) -> None:
        """Holds more for a body or message. A small one does not wait, and so can end requests of its client that do.

        If small ones hold much together, it waits as others do.
        """
        total = self.num_bytes + num_bytes
        if self.budget.has_room_for_small(total, total - self._num_small):
            self.add(num_bytes)
            self._set_small(total)
        else:
            await self.reserve(num_bytes, what, purpose=Purpose.BODY)

    def end_body(self) -> None:
        """Its body, or message, has come."""
        self.budget.note_body_ended(self)

    def add(self, num_bytes: int) -> None:
        """Holds more of what has been made already, so it is too late to refuse it."""
        self.budget.add(self.client, num_bytes)
        self.num_bytes += num_bytes

    def try_add(self, num_bytes: int, what: str) -> str | None:
        """Holds more if there is room now; otherwise returns why not. For a request that is settled."""
        reason = self.budget.refusal(self, num_bytes, what, None)
        if reason is None:
            self.add(num_bytes)
        return reason

    def try_reserve(self, num_bytes: int, what: str) -> str | None:
        """As `reserve`, without a wait: returns why it would wait."""
        reason = self.budget.refusal(self, num_bytes, what, Purpose.FEATURE)
        if reason is None:
            self.budget.give(self, num_bytes, Purpose.FEATURE)
        return reason

    def note_given(self, num_bytes: int, purpose: Purpose) -> None:
        """Counts what the budget has given."""
        num_of_body = num_bytes if purpose is Purpose.BODY else 0
        self.add(num_bytes)
        self.num_unsettled += num_bytes
        self._num_of_body += num_of_body
        self.budget.add_unsettled(num_bytes, num_of_body)

    def give_back(self, num_bytes: int) -> None:
        """Gives back a part, that of the body first."""
        num_unsettled, num_of_body = min(num_bytes, self.num_unsettled), min(num_bytes, self._num_of_body)
        self.num_unsettled -= num_unsettled
        self._num_of_body -= num_of_body
        self.budget.add_unsettled(-num_unsettled, -num_of_body)
        self.add(-num_bytes)

    def settle(self) -> None:
        """The request waits for no more memory: what it holds is given back without anybody's help."""
        self.budget.note_settled(self, self.num_unsettled, self._num_of_body)
        self.num_unsettled = self._num_of_body = 0

    def hand_over(self) -> HeldMemory:
        """A new one, settled, that holds what this one held."""
        other = HeldMemory(self.budget, self.client)
        other.num_bytes, self.num_bytes = self.num_bytes, 0
        other._num_small, self._num_small = self._num_small, 0
        self.settle()
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
        self.settle()
        if num_bytes:
            self.budget.add(self.client, -num_bytes)

    def _set_small(self, num_bytes: int) -> None:
        self.budget.add_small(num_bytes - self._num_small)
        self._num_small = num_bytes


_body: ContextVar[HeldMemory | None] = ContextVar("body", default=None)


def hold_body(held: HeldMemory) -> None:
    """Says what holds the memory of the body, or message, for which the current task works from now on."""
    _body.set(held)


def settle_body() -> None:
    """The request for which the current task works has all that it needs beside its body, too."""
    if (held := _body.get()) is not None:
        held.settle()
