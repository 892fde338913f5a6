"""`HeavyWork`: the one place in which a gateway does what takes more than a millisecond for one client.

Reading a large body, making a prompt of it and writing a large answer are Python and hold the interpreter lock, so they
would delay all streams in another thread, too. Here they have turns between the event loop's other callbacks: one turn
at a time for all requests, and only when the loop has nothing else to do, or has done other things for a few times as
long as the last turn took. What a small request needs is not heavy and never waits for such a turn. But it takes a
millisecond or three, so of small requests that arrive together one begins in each iteration of the event loop.

What releases the lock, or gives it up now and then as templates do, runs in a thread, also one piece of work at a time.
Clients take turns in both queues.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager
from contextvars import ContextVar
from typing import Any, TypeVar

from services.common.fairness import Client, ClientTurns

MAX_INLINE_BYTES = 2**14  # of a body; reading one of this size and making a prompt of it takes about a millisecond
SLICE_S = 0.002  # of processor time: how long one turn of a long piece of work lasts
QUIET_S = 0.000_02  # an iteration of the event loop that takes less processor time has run nothing else
MAX_DEFERRAL = 4  # times the length of the last turn: for so long other work of the event loop goes before the next one

_client: ContextVar[Client] = ContextVar("client", default=(0, 0))  # for whom this task works

T = TypeVar("T")


def work_for(client: Client) -> None:
    """Says for which client the current task, and those that it starts, work from now on."""
    _client.set(client)


def current_client() -> Client:
    """The client for whom the current task works."""
    return _client.get()


class HeavyWork:
    """Used in one event loop. Times are the processor time of its thread: a busy machine does not count."""

    def __init__(self) -> None:
        self._turns = ClientTurns(1)
        self._thread_turns = ClientTurns(1)
        self._alone = ClientTurns(1)
        self._beginnings = ClientTurns(1)
        self._has_begun = False  # whether a small request has, in this iteration of the event loop
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="heavy")
        self._is_in_turn = False
        self._last_turn_s = 0.0
        self._last_end = time.thread_time()

    async def turn(self) -> None:
        """Waits until the current task may compute for some milliseconds, which end when it next awaits something."""
        async with self._turns.turn(_client.get()):
            await self._wait_quiet()
            self._begin()

    def alone(self) -> AbstractAsyncContextManager[None]:
        """A context for several turns between which very many objects stay in memory: one piece of such work at a time.

        A full collection of Python's garbage looks at all objects at once. Those of a hundred pieces take it a second.
        """
        return self._alone.turn(_client.get())

    async def beginning(self) -> None:
        """Waits until the current task, for a small request, may do what reading it and starting its answer take.

        One that arrives alone does not wait. Hundreds that arrive together would keep streams waiting for a second.
        """
        if self._beginnings.is_free and not self._has_begun:
            self._begin_small()
            return
        async with self._beginnings.turn(_client.get()):
            if self._has_begun:
                await asyncio.sleep(0)
            self._begin_small()

    async def pieces(self, pieces: Iterable[bytes]) -> AsyncIterator[bytes]:
        """The bytes of `pieces`, whose making is the work, as many at a time as one turn makes."""
        iterator, is_complete = iter(pieces), False
        while not is_complete:
            await self.turn()
            end, made = time.thread_time() + SLICE_S, []
            is_complete = True
            for piece in iterator:
                made.append(piece)
                if time.thread_time() >= end:
                    is_complete = False
                    break
            yield b"".join(made)

    async def whole(self, pieces: Iterable[bytes]) -> bytes:
        """All bytes of `pieces`, made in turns."""
        return b"".join([each async for each in self.pieces(pieces)])

    async def in_thread(self, function: Callable[..., T], *arguments: Any, goes_on: bool = False) -> T:
        """The result of a function that releases the interpreter lock, or gives it up after a millisecond or two.

        `goes_on`: it is the last such part of a request, which then gives back memory that others of its client may
        wait for. So it comes before theirs.
        """
        async with self._thread_turns.turn(_client.get(), goes_on=goes_on):
            return await asyncio.get_running_loop().run_in_executor(self._thread, function, *arguments)

    def close(self) -> None:
        """Ends the thread; further work for it is refused."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _wait_quiet(self) -> None:
        if self._is_in_turn:  # until its task awaits something, at the end of this iteration
            await asyncio.sleep(0)
        latest = self._last_end + MAX_DEFERRAL * self._last_turn_s
        now = time.thread_time()
        while now < latest:
            before = now
            await asyncio.sleep(0)
            now = time.thread_time()
            if now - before < QUIET_S:
                return

    def _begin(self) -> None:
        self._is_in_turn = True
        # In the next iteration, before whoever is next looks at it.
        asyncio.get_running_loop().call_soon(self._note_end, time.thread_time())

    def _begin_small(self) -> None:
        self._has_begun = True
        asyncio.get_running_loop().call_soon(self._note_begun)

    def _note_begun(self) -> None:
        self._has_begun = False

    def _note_end(self, begin: float) -> None:
        self._is_in_turn = False
        self._last_end = time.thread_time()
        self._last_turn_s = self._last_end - begin
