"""`Recordings`: the resumable requests that this process runs, and those that have ended a moment ago.

Their number and the time of their clients' absence are limited here; their bytes count in the gateway's `MemoryBudget`,
where those that have ended make room for everything else. Everything runs in the event loop.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable

import structlog

from services.common.errors import CapacityError, RequestAborted, TwostrokeError
from services.common.fairness import may_wait, refusal
from services.common.shared_counts import Counts
from services.gateway.request.generation_request import Owner
from services.gateway.resources.memory_budget import HeldMemory, MemoryBudget
from services.gateway.resume.recording import Name, Record, Recording
from services.gateway.resume.resume_metrics import ResumeMetrics

log = structlog.get_logger()

LOOK_S = 0.25  # how often a process that keeps what has ended looks whether others wait for memory
RECLAIMED_PARTS = 8  # of all memory, this part is freed then at a time

Produce = Callable[[Recording], Awaitable[None]]


class Recordings:
    """By name. A recording without a reader is dropped after `timeout_s`, and its request cancelled."""

    def __init__(
        self,
        memory: MemoryBudget,
        metrics: ResumeMetrics,
        timeout_s: float,
        max_number: int,
        counts: Counts,
        on_drop: Callable[[Recording], None],
    ) -> None:
        """`counts`: those of all processes, for whose sum `max_number` is. `on_drop` gets what is forgotten.

        Other processes count only what runs here, for they cannot drop what has ended here.
        """
        self._num_running = counts.gauge("resumable")
        self._running: set[Name] = set()
        self._has_others = counts.is_shared
        self._looking: asyncio.TimerHandle | None = None  # while something is kept that other processes may need
        self._by_name: dict[Name, Recording] = {}  # oldest first
        self._num_of = Counter[Owner]()
        self._timers: dict[Name, asyncio.TimerHandle] = {}  # of those that nobody reads
        self._memory = memory
        self._metrics = metrics
        self._timeout_s = timeout_s
        self._max_number = max_number
        self._on_drop = on_drop
        memory.reclaim = self._reclaim

    def find(self, name: Name) -> Recording | None:
        """The recording of a request; None if it is unknown here."""
        return self._by_name.get(name)

    def start(
        self,
        name: Name,
        record: Record,
        held: HeldMemory,
        produce: Produce,
        *,
        is_repeated: bool = False,
    ) -> Recording:
        """Runs a request whose name is new: `produce` adds its answer to the recording, which takes what `held` holds.

        Raises `CapacityError`; see `make_room`.
        """
        assert name not in self._by_name, "a name is given once"
        self.make_room(name[0])
        recording = Recording(name, record, held.hand_over(), self._wait_for_reader, is_repeated=is_repeated)
        self._by_name[name] = recording
        self._num_of[name[0]] += 1
        self._running.add(name)
        self._num_running.add(1)
        recording.task = asyncio.create_task(self._run(recording, produce))
        return recording

    def make_room(self, owner: Owner) -> None:
        """Drops one that has ended if there are too many for a further one of an owner.

        Raises `CapacityError` if none has ended, or if the rest of the room is kept for others.
        """
        if self._refusal(owner) is not None:
            self._drop_ended()
        if (reason := self._refusal(owner)) is not None:
            raise CapacityError(reason)

    def drop(self, recording: Recording, reason: TwostrokeError | None = None) -> None:
        """Forgets a recording and cancels its request; `reason` is for its readers. Does nothing the second time."""
        if self._remove(recording):
            if recording.task is not None and not recording.is_ended:
                recording.task.cancel()
            recording.release(reason)

    def _remove(self, recording: Recording) -> bool:
        """Forgets the name of a recording; returns whether it was known."""
        if self._by_name.get(recording.name) is not recording:
            return False
        del self._by_name[recording.name]
        owner = recording.name[0]
        self._num_of[owner] -= 1
        self._end_running(recording)
        if not self._num_of[owner]:
            del self._num_of[owner]
        if timer := self._timers.pop(recording.name, None):
            timer.cancel()
        self._on_drop(recording)
        return True

    def _end_running(self, recording: Recording) -> None:
        """The request of a recording has ended, or is dropped. Does nothing the second time."""
        if recording.name in self._running and self._by_name.get(recording.name) in (recording, None):
            self._running.remove(recording.name)
            self._num_running.add(-1)

    def _look_after_others(self) -> None:
        """Drops what has ended while requests of other processes wait for memory, which they cannot free themselves."""
        self._looking = None
        if self._memory.is_wanted_elsewhere:
            self._reclaim(self._memory.max_bytes // RECLAIMED_PARTS)
        if len(self._running) < len(self._by_name):
            self._looking = asyncio.get_running_loop().call_later(LOOK_S, self._look_after_others)

    async def close(self) -> None:
        """Cancels all requests and waits for their ends."""
        if self._looking is not None:
            self._looking.cancel()
        recordings = list(self._by_name.values())
        for recording in recordings:
            self.drop(recording)
        await asyncio.gather(*[each.task for each in recordings if each.task is not None], return_exceptions=True)

    async def _run(self, recording: Recording, produce: Produce) -> None:
        try:
            with recording.record.run.running():
                await produce(recording)
            recording.end(None)
        except TwostrokeError as error:
            recording.end(error)
        except asyncio.CancelledError:
            recording.end(RequestAborted("the request was dropped"))
            raise
        except Exception as error:
            log.error("unexpected error in a resumable request", exc_info=error)
            recording.end(TwostrokeError(f"internal error: {type(error).__name__}"))
        self._end_running(recording)
        if self._has_others and self._looking is None:
            self._looking = asyncio.get_running_loop().call_later(LOOK_S, self._look_after_others)
        if recording.is_error or not recording.num_items or (recording.is_repeated and recording.has_failed):
            self._remove(recording)  # an error that may not come again
            if not recording.has_readers:
                recording.release()

    def _wait_for_reader(self, recording: Recording) -> None:
        """Called when a recording has no reader: gives its client some time to come back."""
        if self._by_name.get(recording.name) is not recording:
            recording.release()
        else:
            loop = asyncio.get_running_loop()
            if timer := self._timers.get(recording.name):
                timer.cancel()
            self._timers[recording.name] = loop.call_later(self._timeout_s, self._expire, recording)

    def _expire(self, recording: Recording) -> None:
        del self._timers[recording.name]
        if recording.has_readers:
            return  # the last one to leave sets the timer again
        if not recording.is_ended:
            log.info("resumable request cancelled", request_id=recording.record.run.request_id, away_s=self._timeout_s)
            self._metrics.on("expired")
        self.drop(recording)

    def _refusal(self, owner: Owner) -> str | None:
        number, num_own = self._num_running.others + len(self._by_name), self._num_of[owner]
        if number >= self._max_number:
            return f"{number} resumable requests are running, the limit (gateway.max_resumable)"
        if not may_wait(self._max_number, number, num_own, 1):
            held = f"{num_own} of {number} resumable requests (gateway.max_resumable)"
            return refusal(held, 1, self._max_number)
        return None

    def _drop_ended(self) -> None:
        """Drops the oldest one that has ended, of the owner with the most."""
        ended = [each for each in self._by_name.values() if each.is_ended and not each.has_readers]
        if ended:
            self.drop(max(ended, key=lambda each: self._num_of[each.name[0]]))  # the first of equal ones

    def _reclaim(self, num_bytes: int) -> None:
        """Drops ended ones, oldest first, for memory that a request needs."""
        goal = self._memory.num_held - num_bytes
        for recording in [each for each in self._by_name.values() if each.is_ended and not each.has_readers]:
            if self._memory.num_held <= goal:
                return
            self.drop(recording)
