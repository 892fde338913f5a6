"""`Resumption`: finds or starts the resumable request that a client names, and reads its answer. For all APIs.

What is promised: while the client is away for at most `gateway.resume_timeout_s`, its request goes on, and it gets the
rest of its answer from exactly behind what it has received. With several gateway processes, any of them serves the
client: one that runs the request sends the answer through it, and if that process is gone, the request is run again.
"""

from __future__ import annotations

from dataclasses import dataclass

from services.common.errors import KeyReused, NotFound, TwostrokeError
from services.gateway.resources.memory_budget import HeldMemory
from services.gateway.resources.repeatable import Repeatable
from services.gateway.resume.guarded_records import GuardedRecords, Record, record_of
from services.gateway.resume.recording import AnswerReader, Name, Received, Recording
from services.gateway.resume.recordings import Produce, Recordings
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


class Resumption:
    """One for a gateway. Runs in the event loop."""

    def __init__(
        self,
        recordings: Recordings,
        guarded: GuardedRecords,
        peers: ResumePeers,
        metrics: ResumeMetrics,
        timeout_s: float,
    ) -> None:
        """`guarded`: what peers have left here."""
        self.recordings = recordings
        self.guarded = guarded
        self._peers = peers
        self._metrics = metrics
        self._timeout_s = timeout_s
        recordings.on_drop = peers.forget

    async def run(self) -> None:
        """Keeps a peer informed, until cancelled."""
        await self._peers.run(lambda: map(record_of, self.recordings))

    async def read(self, call: Call) -> AnswerReader:
        """A reader of the answer; the caller closes it. Runs the request if need be.

        Raises `KeyReused` if the name belongs to another request, `NotFound`, and what `Recording.read` raises.
        """
        try:
            return await self._read(call)
        except TwostrokeError:
            self._metrics.on("refused")
            raise

    def read_here(self, name: Name, fingerprint: bytes | None, received: Received | None) -> AnswerReader:
        """The same of a request that is known to run here, for a peer."""
        recording = self.recordings.find(name)
        if recording is None:
            raise self._unknown(name)
        return self._resume(recording, fingerprint, received)

    async def _read(self, call: Call) -> AnswerReader:
        recording = self.recordings.find(call.name)
        if recording is None:
            found = await self._peers.find(call.name)
            if found.running_at is not None and self.recordings.find(call.name) is None:
                self._metrics.on("resumed")
                return self._peers.reader(found.running_at, call.name, call.fingerprint, call.received)
            record = self.guarded.claim(call.name) or await self._peers.claim(call.name, found)
            recording = self.recordings.find(call.name)  # another call may have started it meanwhile
        if recording is not None:
            return self._resume(recording, call.fingerprint, call.received)
        if record is None and call.received is not None:
            raise self._unknown(call.name)
        return await self._start(call, record)

    async def _start(self, call: Call, record: Record | None) -> AnswerReader:
        """Runs a new request, or one whose process is gone again."""
        run, message, fingerprint = Repeatable(call.request_id), call.message, call.fingerprint or b""
        if record is not None:
            if call.fingerprint not in (None, record.fingerprint):
                self.guarded.keep(record, None)
                raise _reused(call.name)
            run, message, fingerprint = record.run.again(), record.message, record.fingerprint
        recording = self.recordings.start(
            call.name, fingerprint, run, message, call.held.hand_over(), call.produce, is_repeated=record is not None
        )
        received = call.received or Received(0)
        reader = recording.read(received.num_items, received.digest)
        self._metrics.on("begun" if record is None else "repeated")
        if not await self._peers.keep(record_of(recording)):
            self._metrics.on("unguarded")
        return reader

    def _resume(self, recording: Recording, fingerprint: bytes | None, received: Received | None) -> AnswerReader:
        if fingerprint not in (None, recording.fingerprint):
            raise _reused(recording.name)
        received = received or Received(0)
        reader = recording.read(received.num_items, received.digest)
        self._metrics.on("resumed")
        return reader

    def _unknown(self, name: Name) -> NotFound:
        return NotFound(
            f"this client has no resumable request {name[2]!r}: it never began, or the client was away for more than "
            f"{self._timeout_s:g} s (gateway.resume_timeout_s)"
        )


def _reused(name: Name) -> KeyReused:
    return KeyReused(f"{name[2]!r} is the name of another request of this client")
