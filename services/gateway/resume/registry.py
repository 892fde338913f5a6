"""`Registry`: learns from the launcher which gateway process runs a resumable request (`protos/resumables.proto`)."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

import grpc
import structlog

from services.common.errors import KeyReused, PeerError
from services.gateway.link.gateway_peers import decode_owner, encode_owner
from services.gateway.resources.repeatable import Repeatable
from services.gateway.resume.recording import Name, Record
from services.pb import gateway_peers_pb2, resumables_pb2, resumables_pb2_grpc
from services.rpc.client import open_channel

log = structlog.get_logger()

TIMEOUT_S = 2.0  # of a claim
RETRY_S = 0.1
# Of all claims without a reply together: while the launcher hangs, what is said waits in this process.
MAX_CLAIMS = 1024
MAX_CLAIM_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True)
class Claim:
    """Who runs a request. Nobody, if it is unknown and may not be new: then there is neither process nor record."""

    running_at: str | None = None  # another process
    record: Record | None = None  # this process runs the request, from this record
    is_repeated: bool = False  # a process that is gone has run it before
    is_kept: bool = False  # whether the launcher has the record


@dataclass(frozen=True, slots=True)
class _Asked:
    """A claim that has no reply yet."""

    reply: asyncio.Future[resumables_pb2.ClaimReply]
    num_bytes: int


@dataclass(slots=True, eq=False)
class _Stream:
    """What this process says, as an iterator without an end, and what it has claimed.

    Not a generator: gRPC may still wait for its next element when it is collected.

    `messages` is bounded, though the launcher may not read: by `ask`, of claims without a reply; each of these is
    released at most once before its reply; and only what is in `kept` is given up, once.
    """

    messages: asyncio.Queue[resumables_pb2.AttachMessage] = field(default_factory=asyncio.Queue)
    waiting: deque[_Asked] = field(default_factory=deque)
    num_waiting_bytes: int = 0
    kept: set[Name] = field(default_factory=set)  # what the launcher keeps for this process

    def __aiter__(self) -> AsyncIterator[resumables_pb2.AttachMessage]:
        return self

    async def __anext__(self) -> resumables_pb2.AttachMessage:
        return await self.messages.get()

    def ask(self, claim: resumables_pb2.Claim) -> asyncio.Future[resumables_pb2.ClaimReply] | None:
        """Says a claim; returns its reply to come. None: too many have none, and this one is not said."""
        num_bytes = claim.ByteSize()
        if len(self.waiting) >= MAX_CLAIMS or self.num_waiting_bytes + num_bytes > MAX_CLAIM_BYTES:
            return None
        asked = _Asked(asyncio.get_running_loop().create_future(), num_bytes)
        self.waiting.append(asked)
        self.num_waiting_bytes += num_bytes
        self.messages.put_nowait(resumables_pb2.AttachMessage(claim=claim))
        return asked.reply

    def take_asked(self) -> asyncio.Future[resumables_pb2.ClaimReply]:
        """What gets the next reply. Not all wait for theirs any longer."""
        asked = self.waiting.popleft()
        self.num_waiting_bytes -= asked.num_bytes
        return asked.reply


class Registry:
    """Used in the event loop."""

    def __init__(self, address: str | None, process: str, max_message_bytes: int) -> None:
        """`address`: the launcher's; None: there is none, and this process is alone. `process`: its own name."""
        self._address = address
        self._process = process
        self._max_message_bytes = max_message_bytes
        self._stream: _Stream | None = None  # None: the launcher does not know this process now
        self._attached = asyncio.Event()  # set while it does

    async def run(self, on_taken: Callable[[Name], None]) -> None:
        """Stays attached to the launcher, until cancelled. `on_taken` gets requests that another process now runs."""
        while self._address is not None:
            try:
                await self._attach(self._address, on_taken)
            except grpc.aio.AioRpcError as error:
                log.warning("the launcher does not keep resumable requests now", reason=error.details())
            finally:
                self._attached.clear()
                stream, self._stream = self._stream, None
                for asked in stream.waiting if stream is not None else ():
                    if not asked.reply.done():
                        asked.reply.set_result(resumables_pb2.ClaimReply())
            await asyncio.sleep(RETRY_S)

    async def claim(self, name: Name, fingerprint: bytes | None, new: Record | None, instead_of: str = "") -> Claim:
        """Lets this process run a request, unless another one does.

        `fingerprint`: of the request, if it is known. `new`: its record if it is new; None if it may not be.
        `instead_of`: a process that does not answer or does not know the request, and loses it.
        Raises `KeyReused`, or `PeerError` if there is no answer and the request may not be new.
        """
        if self._address is None:
            return Claim(record=new)
        claim = resumables_pb2.Claim(name=encode_name(name), fingerprint=fingerprint, instead_of=instead_of)
        if new is not None:
            claim.record.CopyFrom(_encode_record(new))
        reply = await self._ask(claim)
        if self._stream is not None and (reply.HasField("again") or reply.new_is_kept):
            self._stream.kept.add(name)
        match reply.WhichOneof("outcome"):
            case "running_at":
                return Claim(running_at=reply.running_at)
            case "again":
                return Claim(record=_decode_record(reply.again), is_repeated=True, is_kept=True)
            case "new_is_kept":
                return Claim(record=new, is_kept=reply.new_is_kept)
            case "is_other":
                raise key_reused(name)
            case None if new is None:
                raise PeerError("the launcher does not say which gateway process runs this request: try again")
        return Claim(record=new)

    def release(self, name: Name) -> None:
        """Leaves a request that this process has claimed to whoever claims it next."""
        self._give_up(name, resumables_pb2.AttachMessage(release=encode_name(name)))

    def forget(self, name: Name) -> None:
        """Says that a request is over."""
        self._give_up(name, resumables_pb2.AttachMessage(forget=encode_name(name)))

    def _give_up(self, name: Name, message: resumables_pb2.AttachMessage) -> None:
        """Says it if the launcher keeps the request for this process; otherwise there is nothing to give up."""
        if self._stream is not None and name in self._stream.kept:
            self._stream.kept.remove(name)
            self._stream.messages.put_nowait(message)

    async def _ask(self, claim: resumables_pb2.Claim) -> resumables_pb2.ClaimReply:
        """The launcher's reply; an empty one if it does not answer, or does not answer many others."""
        stream: _Stream | None = None
        reply: asyncio.Future[resumables_pb2.ClaimReply] | None = None
        try:
            async with asyncio.timeout(TIMEOUT_S):
                await self._attached.wait()
                stream = self._stream
                reply = None if stream is None else stream.ask(claim)
                return resumables_pb2.ClaimReply() if reply is None else await reply
        except (asyncio.CancelledError, TimeoutError) as error:
            if stream is not None and reply is not None:
                stream.messages.put_nowait(resumables_pb2.AttachMessage(release=claim.name))  # whatever the reply is
            if isinstance(error, TimeoutError):
                return resumables_pb2.ClaimReply()
            raise

    async def _attach(self, address: str, on_taken: Callable[[Name], None]) -> None:
        stream = _Stream()
        stream.messages.put_nowait(resumables_pb2.AttachMessage(process=self._process))
        async with open_channel(address, self._max_message_bytes) as channel:
            async for message in resumables_pb2_grpc.ResumablesStub(channel).Attach(stream):
                match message.WhichOneof("reply"):
                    case None:
                        self._stream = stream
                        self._attached.set()
                    case "claim":
                        reply = stream.take_asked()
                        if not reply.done():
                            reply.set_result(message.claim)
                            await asyncio.sleep(0)  # who has waited starts the request before it may be taken away
                    case "taken":
                        name = decode_name(message.taken)
                        stream.kept.discard(name)
                        on_taken(name)


def key_reused(name: Name) -> KeyReused:
    """The error for a name that belongs to another request."""
    return KeyReused(f"{name[2]!r} is the name of another request of this client")


def encode_name(name: Name) -> gateway_peers_pb2.ResumableName:
    """The message for a name."""
    owner, kind, text = name
    return gateway_peers_pb2.ResumableName(owner=encode_owner(owner), kind=kind, name=text)


def decode_name(message: gateway_peers_pb2.ResumableName) -> Name:
    """The name of a message."""
    return decode_owner(message.owner), message.kind, message.name


def _encode_record(record: Record) -> resumables_pb2.ResumableRecord:
    run = record.run
    return resumables_pb2.ResumableRecord(
        fingerprint=record.fingerprint,
        request_id=run.request_id,
        entropy=run.entropy,
        created=run.created,
        message=record.message,
    )


def _decode_record(message: resumables_pb2.ResumableRecord) -> Record:
    run = Repeatable(message.request_id, message.entropy, message.created)
    return Record(message.fingerprint, run, message.message)
