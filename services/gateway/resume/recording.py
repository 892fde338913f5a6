"""`Recording`: the answer to a resumable request as it is sent, kept for a client that comes back.

The request runs in a task of its own, which adds *items*: events of an HTTP stream, pieces of another HTTP body, or
messages of gRPC. Each connection of its client is a `Reader`. Everything runs in the event loop.
"""

from __future__ import annotations

import asyncio
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from services.common.errors import (
    CapacityError,
    InvalidRequest,
    NotResumable,
    PeerError,
    RequestAborted,
    TakenOver,
    TwostrokeError,
)
from services.gateway.request.generation_request import Owner
from services.gateway.resources.memory_budget import HeldMemory
from services.gateway.resources.repeatable import Repeatable

BYTES_PER_ITEM = 100  # beside the bytes themselves
MAX_READERS = 16  # connections that wait for one whole answer at the same time

# Whose request it is, over which API ("http" or "grpc"), and the client's name for it.
Name = tuple[Owner, str, str]


@dataclass(frozen=True, slots=True)
class Record:
    """What it takes to run a request again, so that the answer is the same."""

    fingerprint: bytes  # a hash of the request
    run: Repeatable
    message: bytes = b""  # over gRPC: the request; over HTTP the client sends it again


@dataclass(frozen=True, slots=True)
class Received:
    """What a client has of its answer."""

    num_items: int = 0
    digest: int | None = None  # with the last of them, if the client tells


@dataclass(frozen=True, slots=True)
class Beginning:
    """What a client gets before the items."""

    head: bytes  # what its API needs before them
    is_stream: bool
    is_at_end: bool  # whether the client has all items of a complete answer


class AnswerReader(Protocol):
    """Reads the answer of a resumable request. Always call `close`."""

    async def begin(self) -> Beginning:
        """Waits until the answer begins. Call it first. Raises the error that came before, or a wrong position's."""

    async def next(self) -> bytes | None:
        """The next item; None at the end. Raises the error that ended the answer, or this reader."""

    def close(self) -> None:
        """Stops reading. Does nothing the second time."""


class Recording:
    """One answer. `task` runs the request; whoever drops the recording cancels it and calls `release`."""

    def __init__(
        self,
        name: Name,
        record: Record,
        held: HeldMemory,
        on_alone: Callable[[Recording], None],
        *,
        is_repeated: bool = False,
    ) -> None:
        """Owns `held`, which counts its items. `on_alone` is called when nobody reads any longer.

        `is_repeated`: it is run again, so its client may already have more items than there are.
        """
        self.name = name
        self.record = record
        self.is_repeated = is_repeated
        self.task: asyncio.Task[None] | None = None
        self.error: TwostrokeError | None = None
        self.is_ended = False
        self.is_error = False  # whether the items are an error with its status, in place of an answer
        self.lost: str | None = None  # why the answer cannot be resumed any longer
        self.head: bytes | None = None  # what precedes the items; None until it is known
        self.is_stream = False  # whether it has one reader at a time
        self.num_items = 0
        self._digests = array("I")  # `Repeatable.digest` when each item was added
        self._items: deque[bytes] = deque()  # the last ones; unless it is lost, all
        self._held = held
        self._on_alone = on_alone
        self._readers: list[Reader] = []  # oldest first; several only of a whole answer
        self._changed = asyncio.Event()  # replaced at every change

    def begin(self, head: bytes, *, is_stream: bool, is_error: bool = False) -> None:
        """Says what precedes the items, before the first of them."""
        self.head, self.is_stream, self.is_error = head, is_stream, is_error
        if is_error:
            for reader in self._readers:
                reader.restart()
        self._notify()

    async def add(self, item: bytes) -> None:
        """Adds an item. If its bytes do not fit, the answer is lost, and this waits until its client reads.

        Raises `NotResumable` if it is lost and nobody reads.
        """
        if self.lost is None:
            reason = self._held.try_add(BYTES_PER_ITEM + len(item), "the answer of a resumable request")
            if reason is not None:
                self._lose(f"the answer cannot be kept for resumption: {reason}")
        while self.lost is not None and (self._items or not self._readers):
            if not self._readers:
                raise NotResumable(self.lost)
            await self.wait_changed()
        if self.lost is None or self.num_items >= self._readers[0].position:  # otherwise its reader has the item
            self._items.append(item)
        self._digests.append(self.record.run.digest)
        self.num_items += 1
        self._notify()

    def end(self, error: TwostrokeError | None) -> None:
        """There are no further items. Does nothing the second time."""
        if not self.is_ended:
            self.is_ended, self.error = True, error
            self._notify()

    def release(self, reason: TwostrokeError | None = None) -> None:
        """Forgets all items and gives their memory back. Readers get an error."""
        self.end(None)
        self._fail(self._readers, reason or RequestAborted("the request was dropped"))
        self.lost = self.lost or "the request was dropped"
        self._items.clear()
        self._held.release()
        self._notify()

    def read(self, received: Received) -> Reader:
        """A new reader, for the items behind those that its client has.

        Raises `NotResumable`, `CapacityError`, or `InvalidRequest` if there are not so many items.
        """
        if self.lost is not None:
            raise NotResumable(self.lost)
        if self.is_error:
            received = Received()
        if received.num_items > self.num_items and (self.is_ended or not self.is_repeated):
            raise _too_many(received.num_items, self.num_items)
        if len(self._readers) >= MAX_READERS:
            raise CapacityError(f"{len(self._readers)} connections wait for this answer, at most {MAX_READERS} may")
        reader = Reader(self, received)
        self._readers.append(reader)
        return reader

    def take_over(self, reader: Reader) -> None:
        """Fails all readers that are older than `reader`."""
        if reader in self._readers:
            older = self._readers[: self._readers.index(reader)]
            self._fail(older, TakenOver("another connection of this client has taken this stream over"))

    def item(self, position: int) -> bytes | None:
        """The item behind the first `position`; None if there is none yet."""
        return None if position >= self.num_items else self._items[position - self.num_items + len(self._items)]

    def digest(self, position: int) -> int:
        """The digest with the last of the first `position` items, of which there is at least one."""
        return self._digests[position - 1]

    def note_taken(self) -> None:
        """Called when a reader has taken the next item. If the answer is lost, the item is not kept any longer."""
        if self.lost is not None:
            self._items.popleft()
            self._notify()

    async def wait_changed(self) -> None:
        """Waits for the next change of any kind."""
        await self._changed.wait()

    @property
    def has_failed(self) -> bool:
        """Whether the run has ended with an error, which is no part of the answer: a further run may succeed."""
        has_error = self.is_error or self.record.run.has_failed or self.error is not None
        return self.is_ended and has_error and self.lost is None

    @property
    def has_readers(self) -> bool:
        """Whether a connection reads it now."""
        return bool(self._readers)

    def leave(self, reader: Reader) -> None:
        """Called once for each reader that has ended."""
        if reader in self._readers:
            self._readers.remove(reader)
            self._notify()
            if not self._readers:
                self._on_alone(self)

    def _lose(self, reason: str) -> None:
        """Keeps only what the present reader has not read yet."""
        self.lost = reason
        self._fail(self._readers[1:], NotResumable(reason))
        num_unread = max(0, self.num_items - self._readers[0].position) if self._readers else 0
        while len(self._items) > num_unread:
            self._items.popleft()
        self._held.release()

    def _fail(self, readers: Sequence[Reader], error: TwostrokeError) -> None:
        for reader in readers:
            reader.error = error
        self._readers = [each for each in self._readers if each.error is None]
        self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


class Reader:
    """Reads a recording for one connection: an `AnswerReader`."""

    def __init__(self, recording: Recording, received: Received) -> None:
        self._recording = recording
        self._digest = received.digest
        self.position = received.num_items  # items that the client has
        self.error: TwostrokeError | None = None
        self._is_closed = False

    async def begin(self) -> Beginning:
        """See `AnswerReader`. Of a stream, earlier readers get a `TakenOver`."""
        recording = self._recording
        while recording.head is None and not recording.is_ended and self.error is None:
            await recording.wait_changed()
        while recording.num_items < self.position and not recording.is_ended and self.error is None:
            await recording.wait_changed()
        if error := self.error or (recording.error if not recording.num_items else None):
            raise error
        if recording.num_items < self.position:
            if recording.has_failed:
                raise recording.error or PeerError("the request has failed while it ran again: resume it again")
            raise _too_many(self.position, recording.num_items)
        if self._digest is not None and (not self.position or recording.digest(self.position) != self._digest):
            raise NotResumable("the answer does not continue what was received: it is another one")
        if recording.is_stream:
            recording.take_over(self)
        is_at_end = recording.is_ended and recording.error is None and self.position == recording.num_items
        return Beginning(recording.head or b"", recording.is_stream, is_at_end)

    async def next(self) -> bytes | None:
        """See `AnswerReader`."""
        recording = self._recording
        while True:
            if self.error is not None:
                raise self.error
            item = recording.item(self.position)
            if item is not None:
                self.position += 1
                recording.note_taken()
                return item
            if recording.is_ended:
                if recording.error is not None:
                    raise recording.error
                return None
            await recording.wait_changed()

    def restart(self) -> None:
        """Called when an error begins in place of the answer: the client gets it, whatever it has of the answer."""
        self.position, self._digest = 0, None

    def close(self) -> None:
        """Leaves the recording. Does nothing the second time."""
        if not self._is_closed:
            self._is_closed = True
            self._recording.leave(self)


def _too_many(num_received: int, num_sent: int) -> InvalidRequest:
    return InvalidRequest(f"{num_received} items were received, but only {num_sent} were sent")
