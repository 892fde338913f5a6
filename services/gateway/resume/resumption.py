"""`Resumption`: finds or starts the resumable request that a client names, and reads its answer. For all APIs.

What is promised: while the client is away for at most `gateway.resume_timeout_s`, its request goes on, and it gets the
rest of its answer from exactly behind what it has received. Any gateway process of the server serves the client: one
that runs the request sends the answer through it, and if that process is gone, the request is run again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from weakref import WeakValueDictionary

from services.common.config import GatewaySection
from services.common.errors import CapacityError, NotFound, PeerError, TakenOver, TwostrokeError
from services.common.shared_counts import Counts
from services.gateway.resources.memory_budget import HeldMemory, MemoryBudget
from services.gateway.resources.repeatable import Repeatable
from services.gateway.resume.recording import AnswerReader, Name, Received, Record, Recording
from services.gateway.resume.recordings import Produce, Recordings
from services.gateway.resume.registry import Claim, Registry, key_reused
from services.gateway.resume.resume_metrics import ResumeMetrics
from services.gateway.resume.resume_peers import ResumePeers


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a client that names its request."""

    name: Name
    fingerprint: bytes | None  # a hash of the request; None if the call does not repeat it
    received: Received | None  # None: it wants the answer from the beginning, and the request may be new
    produce: Produce  # runs the request; see `Recordings.start`
    held: HeldMemory  # of the call; what it holds is taken if the call starts the request
    request_id: str = ""  # of a new request
    message: bytes = b""  # over gRPC: the request, if the call repeats it

    def new_record(self) -> Record | None:
        """The record if the request is new; None if it may not be."""
        if self.received is not None or self.fingerprint is None:
            return None
        return Record(self.fingerprint, Repeatable(self.request_id), self.message)


class Resumption:
    """One for a gateway. Runs in the event loop."""

    def __init__(
        self,
        section: GatewaySection,
        memory: MemoryBudget,
        counts: Counts,
        registry: Registry,
        metrics: ResumeMetrics,
        wait_ready: Callable[[], Awaitable[None]],
    ) -> None:
        """`counts`: those of all processes. `wait_ready` returns once requests can run; raises `PeerError` after its
        own time limit.
        """
        self._timeout_s = section.resume_timeout_s
        self._recordings = Recordings(
            memory, metrics, self._timeout_s, section.max_resumable, counts, self._let_go
        )
        self._registry = registry
        self._peers = ResumePeers()
        self._metrics = metrics
        self._wait_ready = wait_ready
        self._starting = WeakValueDictionary[Name, asyncio.Lock]()  # held from a claim to the start

    async def run(self) -> None:
        """Stays in touch with the launcher, until cancelled."""
        await self._registry.run(self._lose)

    async def close(self) -> None:
        """Cancels all requests, and closes all connections."""
        await self._peers.close()
        await self._recordings.close()

    async def read(self, call: Call) -> AnswerReader:
        """A reader of the answer; the caller closes it. Runs the request if need be.

        Raises `KeyReused` if the name belongs to another request, `NotFound`, `PeerError` if the request may run in
        a process that does not answer, and what `Recording.read` raises.
        """
        try:
            return await self._read(call)
        except TwostrokeError:
            self._metrics.on("refused")
            raise

    async def read_here(self, name: Name, fingerprint: bytes | None, received: Received | None) -> AnswerReader:
        """A reader of the answer to a request that runs here, for a peer. Raises `NotFound` if it does not."""
        async with self._lock(name):
            recording = self._recordings.find(name)
            if recording is None:
                raise self._unknown(name)
            return self._resume(recording, fingerprint, received)

    async def _read(self, call: Call) -> AnswerReader:
        silent = ""  # a process that should run the request and does not send it
        while True:
            async with self._lock(call.name):
                recording = self._recordings.find(call.name)
                if recording is not None:
                    return self._resume(recording, call.fingerprint, call.received)
                self._recordings.make_room(call.name[0])  # before the launcher takes this process for the one to ask
                claim = await self._registry.claim(call.name, call.fingerprint, call.new_record(), silent)
                if claim.running_at is None:
                    return self._start(call, claim)
            reader = await self._peers.open(claim.running_at, call.name, call.fingerprint, call.received)
            if reader is not None:
                self._metrics.on("resumed")
                return reader
            if silent:
                raise PeerError("two gateway processes in turn do not send the answer: try again")
            silent = claim.running_at

    def _start(self, call: Call, claim: Claim) -> AnswerReader:
        """Runs a new request, or one whose process is gone again."""
        if claim.record is None:
            raise self._unknown(call.name)
        produce = self._when_ready(call.produce) if claim.is_repeated else call.produce
        try:
            recording = self._recordings.start(
                call.name, claim.record, call.held, produce, is_repeated=claim.is_repeated
            )
        except CapacityError:
            self._registry.release(call.name)
            raise
        self._metrics.on("repeated" if claim.is_repeated else "begun")
        if not claim.is_kept:
            self._metrics.on("unguarded")
        return recording.read(call.received or Received())

    def _when_ready(self, produce: Produce) -> Produce:
        """Waits first for the dense worker, which a process that has just started may not have yet."""

        async def run(recording: Recording) -> None:
            await self._wait_ready()
            await produce(recording)

        return run

    def _resume(self, recording: Recording, fingerprint: bytes | None, received: Received | None) -> AnswerReader:
        if fingerprint not in (None, recording.record.fingerprint):
            raise key_reused(recording.name)
        reader = recording.read(received or Received())
        self._metrics.on("resumed")
        return reader

    def _let_go(self, recording: Recording) -> None:
        if recording.is_repeated and recording.has_failed:
            self._registry.release(recording.name)  # for its client, who may try again
        else:
            self._registry.forget(recording.name)

    def _lose(self, name: Name) -> None:
        """Another process runs the request, because this one has not answered."""
        recording = self._recordings.find(name)
        if recording is not None:
            self._recordings.drop(recording, TakenOver("another gateway process has taken this request over"))

    def _lock(self, name: Name) -> asyncio.Lock:
        return self._starting.setdefault(name, asyncio.Lock())

    def _unknown(self, name: Name) -> NotFound:
        return NotFound(
            f"this client has no resumable request {name[2]!r}: it never began, or the client was away for more than "
            f"{self._timeout_s:g} s (gateway.resume_timeout_s)"
        )
