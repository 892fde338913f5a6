"""`Turns`: the steps of several lanes on one thread, as on a CPU: while one waits for the peer, another one runs.

A step is an iterator. It runs up to a handoff, yields the flag that it needs, and goes on once that is set. Both
workers do it alike, so one computes a step of one lane while the other computes one of another lane.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Protocol

from services.channel import Channel, ChannelTimeout, Flag
from services.channel.shm import NAP_S, SPIN_S, YIELD_S


class Ending(Protocol):
    """What a step may have to come after."""

    def is_done(self) -> bool: ...


class TurnChannel(Channel, Protocol):
    """A channel whose flags the host can look at."""

    waited_s: float
    wait_timeout_s: float

    def has_signal(self, flag: Flag) -> bool:
        """Whether `wait` would return at once. Raises `ChannelAborted` after an abort."""
        ...


class Turn:
    """A step of one lane, until it is done. `parts` yields before each wait."""

    def __init__(self, channel: TurnChannel, parts: Iterator[Flag], after: Iterable[Ending] = ()) -> None:
        self.channel = channel
        self.is_done = False
        self.awaited: Flag | None = None  # None: it has not begun
        self.parts = parts
        self.after = tuple(after)  # it begins when these have ended
        self.since_s = 0.0  # when it began to wait

    def may_go_on(self) -> bool:
        """Whether it can run now. Raises `ChannelAborted` after an abort."""
        if self.awaited is not None:
            return self.channel.has_signal(self.awaited)
        return all([each.is_done() for each in self.after])


class Turns:
    """The steps of each lane run in their order, those of different lanes by turns. For one thread."""

    def __init__(self) -> None:
        self._lanes: dict[TurnChannel, deque[Turn]] = {}  # the lane whose turn is next comes first
        self._idle_since_s: float | None = None  # None: something has just run

    def add(self, turn: Turn) -> None:
        """A step runs after those of its lane that have been added before."""
        self._lanes.setdefault(turn.channel, deque()).append(turn)

    def remove(self, turn: Turn) -> None:
        """Forgets a step that will not be run to its end."""
        if turn in (lane := self._lanes.get(turn.channel, deque())):
            lane.remove(turn)

    def clear(self) -> None:
        """Forgets all steps."""
        self._lanes.clear()
        self._idle_since_s = None

    @property
    def has_any(self) -> bool:
        """Whether a step is not done."""
        return any(self._lanes.values())

    def go_on(self) -> bool:
        """Runs a step up to its next wait, if any can run. Raises what the step raises, and `ChannelAborted`."""
        turn = next((lane[0] for lane in self._lanes.values() if lane and lane[0].may_go_on()), None)
        if turn is None:
            return False
        if self._idle_since_s is not None:
            self._end_idleness(self._idle_since_s)
        self._lanes[turn.channel] = self._lanes.pop(turn.channel)  # the others have their turn first
        turn.after = ()  # these hold those before them, and so on: all steps there ever were
        try:
            turn.awaited = next(turn.parts)
        except StopIteration:
            turn.is_done = True
            self._lanes[turn.channel].popleft()
        else:
            turn.since_s = time.perf_counter()
        return True

    def pause(self) -> None:
        """Waits a little, since no step can go on. Raises `ChannelTimeout` if a peer has not signalled for too long."""
        now_s = time.perf_counter()
        if self._idle_since_s is None:
            self._idle_since_s = now_s
            for turn in self._waiting():
                turn.channel.is_waiting = True
        waited_s = now_s - self._idle_since_s
        if waited_s < SPIN_S:
            return
        if waited_s < YIELD_S:
            os.sched_yield()
            return
        for turn in self._waiting():
            if now_s - turn.since_s > turn.channel.wait_timeout_s:
                raise ChannelTimeout(f"no {turn.awaited.name} from the peer within {turn.channel.wait_timeout_s} s")
        time.sleep(NAP_S)

    def _waiting(self) -> Iterator[Turn]:
        return (lane[0] for lane in self._lanes.values() if lane and lane[0].awaited is not None)

    def _end_idleness(self, since_s: float) -> None:
        waited_s, self._idle_since_s = time.perf_counter() - since_s, None
        for turn in self._waiting():
            turn.channel.is_waiting = False
            turn.channel.waited_s += waited_s
