"""`Resumables`: which gateway process runs each resumable request, and what it takes to run it again.

The launcher keeps this for its gateways (`protos/resumables.proto`), because it outlives them: whichever of them die,
and however many at once, those that are left or start next can answer. Runs on the event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

import grpc

from services.common.errors import InvalidRequest
from services.pb import gateway_peers_pb2, resumables_pb2, resumables_pb2_grpc
from services.rpc.server import until_over

SERVICE_NAME = resumables_pb2.DESCRIPTOR.services_by_name["Resumables"].full_name
BYTES_PER_ENTRY = 1000  # beside the client's message

Replies = asyncio.Queue[resumables_pb2.AttachReply]


@dataclass(slots=True, eq=False)
class _Entry:
    name: gateway_peers_pb2.ResumableName
    record: resumables_pb2.ResumableRecord
    process: str | None  # that runs it; None: it is gone
    num_releases: int = 0  # how often a process has gone; an older timer leaves the entry alone

    @property
    def num_bytes(self) -> int:
        return BYTES_PER_ENTRY + len(self.record.message)


class Resumables:
    """By name. An entry without a process is dropped after `timeout_s`."""

    def __init__(self, max_number: int, max_bytes: int, timeout_s: float) -> None:
        """`max_bytes`: of all records together."""
        self._max_number = max_number
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s
        self._num_bytes = 0
        self._by_name: dict[bytes, _Entry] = {}
        self._attached: dict[str, Replies] = {}  # by name of the process

    def __len__(self) -> int:
        return len(self._by_name)

    def attach(self, process: str, replies: Replies) -> None:
        """A process begins; one of the same name before it is gone."""
        self._leave(process)
        self._attached[process] = replies

    def detach(self, process: str, replies: Replies) -> None:
        """A process is gone, unless another one of its name has begun meanwhile."""
        if self._attached.get(process) is replies:
            self._leave(process)

    def claim(self, process: str, claim: resumables_pb2.Claim) -> resumables_pb2.ClaimReply:
        """Lets a process run a request, unless another one does."""
        entry = self._by_name.get(_key(claim.name))
        if entry is None:
            return self._begin(process, claim)
        if claim.HasField("fingerprint") and claim.fingerprint != entry.record.fingerprint:
            return resumables_pb2.ClaimReply(is_other=True)
        other = entry.process if entry.process != process else None
        if other is not None:
            if other != claim.instead_of:
                return resumables_pb2.ClaimReply(running_at=other)
            self._attached[other].put_nowait(resumables_pb2.AttachReply(taken=entry.name))
        entry.process = process
        return resumables_pb2.ClaimReply(again=entry.record)

    def release(self, process: str, name: gateway_peers_pb2.ResumableName) -> None:
        """Leaves a request to whoever claims it next. Does nothing if another process runs it."""
        entry = self._by_name.get(_key(name))
        if entry is not None and entry.process == process:
            self._drop_later([entry])

    def forget(self, process: str, name: gateway_peers_pb2.ResumableName) -> None:
        """Drops the record of a request. Does nothing if another process runs it."""
        entry = self._by_name.get(_key(name))
        if entry is not None and entry.process == process:
            self._drop(entry)

    def _begin(self, process: str, claim: resumables_pb2.Claim) -> resumables_pb2.ClaimReply:
        if not claim.HasField("record"):
            return resumables_pb2.ClaimReply(is_unknown=True)
        entry = _Entry(claim.name, claim.record, process)
        has_room = len(self) < self._max_number and self._num_bytes + entry.num_bytes <= self._max_bytes
        if has_room:
            self._by_name[_key(claim.name)] = entry
            self._num_bytes += entry.num_bytes
        return resumables_pb2.ClaimReply(new_is_kept=has_room)

    def _leave(self, process: str) -> None:
        if self._attached.pop(process, None) is not None:
            self._drop_later([each for each in self._by_name.values() if each.process == process])

    def _drop_later(self, entries: Sequence[_Entry]) -> None:
        """Drops entries that nobody claims in time."""
        for entry in entries:
            entry.process = None
            entry.num_releases += 1
        due = [(entry, entry.num_releases) for entry in entries]
        asyncio.get_running_loop().call_later(self._timeout_s, self._drop_unclaimed, due)

    def _drop_unclaimed(self, due: Sequence[tuple[_Entry, int]]) -> None:
        for entry, num_releases in due:
            if entry.process is None and entry.num_releases == num_releases:
                self._drop(entry)

    def _drop(self, entry: _Entry) -> None:
        if self._by_name.pop(_key(entry.name), None) is not None:
            self._num_bytes -= entry.num_bytes


class ResumablesServicer(resumables_pb2_grpc.ResumablesServicer):
    """Believes its callers: they are processes of the same user."""

    def __init__(self, resumables: Resumables) -> None:
        self._resumables = resumables

    async def Attach(
        self, requests: AsyncIterator[resumables_pb2.AttachMessage], context: grpc.aio.ServicerContext
    ) -> None:
        messages, replies = until_over(requests), Replies()
        first = await anext(messages, resumables_pb2.AttachMessage())
        if not first.process:
            raise InvalidRequest("the first message has no process", "process")
        self._resumables.attach(first.process, replies)
        replies.put_nowait(resumables_pb2.AttachReply())
        writing = asyncio.create_task(_write(replies, context))
        try:
            async for message in messages:
                self._handle(first.process, message, replies)
        finally:
            self._resumables.detach(first.process, replies)
            writing.cancel()
            await asyncio.gather(writing, return_exceptions=True)

    def _handle(self, process: str, message: resumables_pb2.AttachMessage, replies: Replies) -> None:
        match message.WhichOneof("message"):
            case "claim":
                reply = self._resumables.claim(process, message.claim)
                replies.put_nowait(resumables_pb2.AttachReply(claim=reply))
            case "release":
                self._resumables.release(process, message.release)
            case "forget":
                self._resumables.forget(process, message.forget)


async def _write(replies: Replies, context: grpc.aio.ServicerContext) -> None:
    while True:
        await context.write(await replies.get())


def _key(name: gateway_peers_pb2.ResumableName) -> bytes:
    return name.SerializeToString(deterministic=True)
