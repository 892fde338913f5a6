"""`GuardedRecords`: what a gateway process keeps of the resumable requests of a peer, to run them again if it dies."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from services.gateway.link.gateway_peers import decode_owner, encode_owner
from services.gateway.resources.memory_budget import HeldMemory, MemoryBudget
from services.gateway.resources.repeatable import Repeatable
from services.gateway.resume.recording import Name, Recording
from services.pb import gateway_peers_pb2

NOBODY = (0, 0)  # the client that holds the records: none in particular
BYTES_PER_RECORD = 1000  # beside its message


@dataclass(frozen=True, slots=True)
class Record:
    """What it takes to run a resumable request again."""

    name: Name
    fingerprint: bytes
    run: Repeatable
    message: bytes  # over gRPC: the request


@dataclass(slots=True, eq=False)
class _Guarded:
    record: Record
    peer: object | None  # identifies the stream of the process that runs it; None: the stream has ended
    held: HeldMemory


class GuardedRecords:
    """By name. Runs in the event loop. Records whose process is gone are dropped after `timeout_s`."""

    def __init__(self, memory: MemoryBudget, timeout_s: float) -> None:
        self._memory = memory
        self._timeout_s = timeout_s
        self._by_name: dict[Name, _Guarded] = {}

    def __contains__(self, name: Name) -> bool:
        return name in self._by_name

    def keep(self, record: Record, peer: object | None) -> bool:
        """Keeps a record of a peer, in place of an older one; returns whether there is memory for it."""
        self.claim(record.name)
        held = HeldMemory(self._memory, NOBODY)
        if held.try_reserve(BYTES_PER_RECORD + len(record.message), "a record of a resumable request") is not None:
            return False
        guarded = self._by_name[record.name] = _Guarded(record, peer, held)
        if peer is None:
            self._drop_later([guarded])
        return True

    def claim(self, name: Name) -> Record | None:
        """Takes a record away; None if there is none."""
        guarded = self._by_name.pop(name, None)
        if guarded is None:
            return None
        guarded.held.release()
        return guarded.record

    def note_end(self, peer: object) -> None:
        """The stream of a peer has ended: its requests may be run again, if their clients come in time."""
        left = [each for each in self._by_name.values() if each.peer is peer]
        for each in left:
            each.peer = None
        if left:
            self._drop_later(left)

    def _drop_later(self, guarded: list[_Guarded]) -> None:
        asyncio.get_running_loop().call_later(self._timeout_s, self._drop, guarded)

    def _drop(self, guarded: list[_Guarded]) -> None:
        for each in guarded:
            if self._by_name.get(each.record.name) is each:
                self.claim(each.record.name)


def record_of(recording: Recording) -> Record:
    """The record of a request that runs here."""
    return Record(recording.name, recording.fingerprint, recording.run, recording.message)


def encode_name(name: Name) -> gateway_peers_pb2.ResumableName:
    """The message for a name."""
    owner, kind, text = name
    return gateway_peers_pb2.ResumableName(owner=encode_owner(owner), kind=kind, name=text)


def decode_name(message: gateway_peers_pb2.ResumableName) -> Name:
    """The name of a message."""
    return decode_owner(message.owner), message.kind, message.name


def encode_record(record: Record) -> gateway_peers_pb2.ResumableRecord:
    """The message for a record."""
    return gateway_peers_pb2.ResumableRecord(
        name=encode_name(record.name),
        fingerprint=record.fingerprint,
        request_id=record.run.request_id,
        entropy=record.run.entropy,
        created=record.run.created,
        message=record.message,
    )


def decode_record(message: gateway_peers_pb2.ResumableRecord) -> Record:
    """The record of a message."""
    run = Repeatable(message.request_id, message.entropy, message.created)
    return Record(decode_name(message.name), message.fingerprint, run, message.message)
