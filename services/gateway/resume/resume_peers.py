"""`ResumePeers`: resumable requests and the other gateway processes of this server (`protos/gateway_peers.proto`).

One of them, the *guard*, keeps a record of each resumable request that this process runs. All are asked for a request
that is unknown here.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass, field

import grpc
import structlog

from services.common.config import MAX_MESSAGE_BYTES
from services.common.errors import NotFound, PeerError
from services.gateway.resume.guarded_records import Record, decode_record, encode_name, encode_record
from services.gateway.resume.recording import Beginning, Name, Received, Recording
from services.pb import gateway_peers_pb2, gateway_peers_pb2_grpc
from services.rpc.client import open_channel
from services.rpc.error_details import error_of

log = structlog.get_logger()

TIMEOUT_S = 2.0  # of a call, and of the wait for the guard before the first byte of an answer
RETRY_S = 0.1


@dataclass(frozen=True, slots=True)
class Found:
    """Where a request is."""

    running_at: str | None = None  # address of the peer that runs it
    guarded_at: Sequence[str] = ()  # addresses of peers that keep a record of it


@dataclass(slots=True, eq=False)
class _GuardStream:
    """Changes on their way to the guard, as an iterator without an end.

    Not a generator: gRPC may still wait for its next element when it is collected.
    """

    changes: asyncio.Queue[gateway_peers_pb2.GuardChange] = field(default_factory=asyncio.Queue)
    sent: deque[Name | None] = field(default_factory=deque)  # names of kept records without an answer; None: others

    def __aiter__(self) -> AsyncIterator[gateway_peers_pb2.GuardChange]:
        return self

    async def __anext__(self) -> gateway_peers_pb2.GuardChange:
        return await self.changes.get()

    def put(self, change: gateway_peers_pb2.GuardChange, name: Name | None) -> None:
        """Sends a change."""
        self.changes.put_nowait(change)
        self.sent.append(name)


class ResumePeers:
    """Used in the event loop. Without peers nothing is guarded, and nothing is found."""

    def __init__(self, own_address: str | None, addresses: Sequence[str], max_message_bytes: int) -> None:
        """The next address after this process's own, in alphabetical order, is the first choice for the guard."""
        later = sorted(each for each in addresses if own_address is not None and each > own_address)
        self._addresses = [*later, *sorted(set(addresses) - set(later))]
        self._max_message_bytes = max_message_bytes
        self._channels: dict[str, grpc.aio.Channel] = {}  # kept: each new request asks all
        self._guard: _GuardStream | None = None  # None: there is none now
        self._kept: dict[Name, asyncio.Future[bool]] = {}  # whether the guard keeps them, for those who wait for that

    async def run(self, records: Callable[[], Iterable[Record]]) -> None:
        """Keeps `records()` and all changes of them with a guard, until cancelled."""
        while self._addresses:
            for address in self._addresses:
                try:
                    await self._run_guard(address, records)
                except grpc.aio.AioRpcError as error:
                    log.debug("no guard for resumable requests", address=address, reason=error.details())
                finally:
                    self._guard = None
                    for future in self._kept.values():
                        _resolve(future, is_kept=False)
            await asyncio.sleep(RETRY_S)

    async def close(self) -> None:
        """Closes all connections."""
        for channel in self._channels.values():
            await channel.close()

    async def keep(self, record: Record) -> bool:
        """Gives the guard a record; returns whether it has it. True if there are no peers at all."""
        if not self._addresses:
            return True
        if self._guard is None:
            return False
        future = self._kept[record.name] = asyncio.get_running_loop().create_future()
        self._guard.put(gateway_peers_pb2.GuardChange(keep=encode_record(record)), record.name)
        try:
            await asyncio.wait({future}, timeout=TIMEOUT_S)
            return future.done() and future.result()
        finally:
            if self._kept.get(record.name) is future:
                del self._kept[record.name]

    def forget(self, recording: Recording) -> None:
        """Has the guard drop a record."""
        if self._guard is not None:
            self._guard.put(gateway_peers_pb2.GuardChange(forget=encode_name(recording.name)), None)

    async def find(self, name: Name) -> Found:
        """Asks all peers. Raises `PeerError` if one that may run the request does not answer."""
        request = gateway_peers_pb2.FindResumableRequest(name=encode_name(name))

        async def ask(address: str) -> gateway_peers_pb2.FindResumableResponse | None:
            try:
                return await self._stub(address).FindResumable(request, timeout=TIMEOUT_S)
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.UNAVAILABLE:  # then it does not run, nor do its requests
                    reason = error.details()
                    raise PeerError(f"another gateway process does not answer ({reason}): try again") from error
                return None

        answers = dict(zip(self._addresses, await asyncio.gather(*map(ask, self._addresses)), strict=True))
        running = [address for address, answer in answers.items() if answer is not None and answer.is_running]
        guarded = [address for address, answer in answers.items() if answer is not None and answer.is_guarded]
        return Found(running[0] if running else None, guarded)

    async def claim(self, name: Name, found: Found) -> Record | None:
        """Takes the record of a request from the peer that has it."""
        request = gateway_peers_pb2.ClaimResumableRequest(name=encode_name(name))
        for address in found.guarded_at:
            with contextlib.suppress(grpc.aio.AioRpcError):  # it has died since
                answer = await self._stub(address).ClaimResumable(request, timeout=TIMEOUT_S)
                if answer.HasField("record"):
                    return decode_record(answer.record)
        return None

    def reader(self, address: str, name: Name, fingerprint: bytes | None, received: Received | None) -> RemoteReader:
        """Reads the answer of a request that a peer runs."""
        request = gateway_peers_pb2.ReadResumableRequest(name=encode_name(name), fingerprint=fingerprint)
        if received is not None:
            request.num_received = received.num_items
            if received.digest is not None:
                request.digest = received.digest
        return RemoteReader(self._stub(address).ReadResumable(request))

    async def _run_guard(self, address: str, records: Callable[[], Iterable[Record]]) -> None:
        stream = _GuardStream()
        stream.put(gateway_peers_pb2.GuardChange(), None)
        async with open_channel(address, self._max_message_bytes) as channel:
            stub = gateway_peers_pb2_grpc.GatewayPeersStub(channel)
            async for ack in stub.GuardResumables(stream):
                name = stream.sent.popleft()
                if self._guard is None:  # it has answered for the first time
                    self._guard = stream
                    for record in records():
                        stream.put(gateway_peers_pb2.GuardChange(keep=encode_record(record)), record.name)
                if name in self._kept:
                    _resolve(self._kept[name], is_kept=ack.is_kept)

    def _stub(self, address: str) -> gateway_peers_pb2_grpc.GatewayPeersStub:
        if address not in self._channels:
            self._channels[address] = open_channel(address, MAX_MESSAGE_BYTES)
        return gateway_peers_pb2_grpc.GatewayPeersStub(self._channels[address])


class RemoteReader:
    """An `AnswerReader` of a request that a peer runs."""

    def __init__(self, call: grpc.aio.UnaryStreamCall) -> None:
        self._call = call

    async def begin(self) -> Beginning:
        piece = await self._read()
        if piece is None:
            raise NotFound("the request has just been forgotten")
        return Beginning(piece.head, piece.is_stream, piece.is_at_end)

    async def next(self) -> bytes | None:
        piece = await self._read()
        return None if piece is None else piece.item

    def close(self) -> None:
        self._call.cancel()

    async def _read(self) -> gateway_peers_pb2.ResumablePiece | None:
        try:
            piece = await self._call.read()
        except grpc.aio.AioRpcError as error:
            raise error_of(error) or PeerError(
                f"the gateway process that ran this request is gone ({error.details()}): resume it again"
            ) from error
        return None if piece is grpc.aio.EOF else piece


def _resolve(future: asyncio.Future[bool], *, is_kept: bool) -> None:
    if not future.done():
        future.set_result(is_kept)
