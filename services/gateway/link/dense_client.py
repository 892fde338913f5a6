"""One stream of the gateway to a dense worker: it sends sequences and receives the tokens of every step.

It runs in the gateway's event loop. While a stream is connected, one task writes and one reads. When it breaks, the
client connects again and continues its open sequences; requests see a pause.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator
from functools import partial
from typing import Protocol, TypeAlias

import grpc
import structlog

from services.common.config import PeerSection
from services.common.errors import CapacityError, PeerError
from services.common.fairness import ClientQueue
from services.gateway.link.crash_record import CrashRecord
from services.gateway.link.dense_messages import encode_submit, keep_output, keep_reports
from services.gateway.link.journal_entry import JournalEntry, StreamSequences
from services.gateway.link.sent_parts import SentParts
from services.gateway.link.served_model import (
    ServedModel,
    ask_info,
    peer_error,
    served_model,
    wait_info,
    wait_offer,
)
from services.pb import dense_pb2, dense_pb2_grpc
from services.rpc.client import open_channel, read_peer_tls
from services.rpc.stream_socket import StreamSocket

log = structlog.get_logger()

FIRST_RETRY_S = 0.02
MAX_RETRY_S = 0.1
_ANNOUNCEMENT = dense_pb2.GatewayMessage(announcement=dense_pb2.Announcement()).SerializeToString()
LAST_MESSAGES_S = 1.0  # that a stream that has ended may go on by its socket, or the other way round


class StreamReopened(PeerError):
    """The gateway itself ended a stream to look for another worker."""


class StreamPool(Protocol):
    """What decides which sequences each stream runs: `DensePool`."""

    prefix_generation: int  # the highest that a worker has confirmed after a flush; 0: there was none

    def accept(self, client: DenseClient, model: ServedModel) -> None:
        """Accepts the worker that a stream has found, or raises `PeerError` to refuse it."""

    def assign_orphaned_sequences(self, client: DenseClient) -> None:
        """Called before a stream continues its sequences; may give it more of them."""

    async def note_connection(self, client: DenseClient, is_connected: bool) -> None:
        """Called when a stream connects or breaks."""


class DenseClient:
    """Keeps the stream connected while `run` runs. Its pool decides which sequences it runs.

    A sequence waits for a lost dense worker for `peers.connect_timeout_s`, then fails with `PeerError`.
    """

    def __init__(self, address: str, peers: PeerSection, sequences: StreamSequences, pool: StreamPool) -> None:
        self._address = address
        self._peers = peers
        self._tls = read_peer_tls(peers)
        self.sequences = sequences  # the sequences that this stream runs
        self._pool = pool
        self._crashes = CrashRecord(sequences)
        self.worker: int | None = None  # epoch of the connected dense worker, or of the last one
        self.num_resubmitted = 0  # total number of sequences that were running when a stream broke
        self.num_messages = 0  # total number of messages from the dense worker
        self._outbox: Outbox | None = None  # None without a stream
        self._socket: StreamSocket | None = None  # for the stream's messages; None: they go by gRPC
        self._rehearses = False  # whether the worker gets ready for requests that are announced
        self._has_submitted = False  # a sequence at once, in this iteration of the event loop
        self._wait_limits: dict[int, asyncio.TimerHandle] = {}  # by seq_id, while there is no stream
        self._forgetting = deque[asyncio.Future[bool]]()  # what the worker shall confirm, in order
        self._absence_reason = ""  # why there is no stream

    @property
    def is_connected(self) -> bool:
        """Whether the stream is connected."""
        return self._outbox is not None

    def unready_reason(self) -> str:
        """Why there is no stream now."""
        return f"no dense worker at {self._address}: {self._absence_reason or 'not connected yet'}"

    def absence(self) -> PeerError:
        """The error of a sequence that has waited too long for a stream."""
        timeout_s = self._peers.connect_timeout_s
        return PeerError(f"no dense worker at {self._address} within {timeout_s:g} s: {self._absence_reason}")

    def submit(self, entry: JournalEntry) -> None:
        """Starts one of the stream's sequences, now or as soon as there is a connection."""
        socket = self._free_socket
        if self._outbox is None:
            self._limit_wait(entry)
        elif socket is None or self._outbox or self._has_submitted or not _is_plain(entry):
            self._outbox.submit(entry)
        else:
            self._has_submitted = True
            asyncio.get_running_loop().call_soon(self._begin_iteration)
            socket.send(encode_submit(entry).SerializeToString())

    def announce(self) -> None:
        """A request has begun to arrive: a worker on this host that is idle may get ready for it."""
        if self._rehearses and not self.sequences and (socket := self._free_socket) is not None:
            socket.send(_ANNOUNCEMENT)

    @property
    def _free_socket(self) -> StreamSocket | None:
        """Where a message may be written at once."""
        return self._socket if self._socket is not None and self._socket.is_read else None

    def _begin_iteration(self) -> None:
        self._has_submitted = False

    def cancel(self, entry: JournalEntry) -> None:
        """Makes the dense worker forget a sequence. Without a stream it has forgotten all of them already."""
        if self._outbox is not None:
            self._outbox.put(dense_pb2.GatewayMessage(cancel=dense_pb2.Cancel(seq_id=entry.seq_id)))
        elif entry.seq_id in self._wait_limits:
            self._wait_limits.pop(entry.seq_id).cancel()

    def forget_prefixes(self) -> asyncio.Future[bool]:
        """Sequences that are submitted from now on find no blocks of earlier ones. There must be a stream.

        The future gets whether the worker has confirmed it before the stream broke.
        """
        assert self._outbox is not None, "the caller looks for connected streams"
        self._outbox.put(dense_pb2.GatewayMessage(forget_prefixes=dense_pb2.ForgetPrefixes()))
        return self._await_confirmation()

    def _await_confirmation(self) -> asyncio.Future[bool]:
        self._forgetting.append(asyncio.get_running_loop().create_future())
        return self._forgetting[-1]

    def resubmit(self, entry: JournalEntry) -> None:
        """Continues a sequence that ran on another stream."""
        self.num_resubmitted += entry.queue_s is not None
        self.submit(entry)

    def reopen(self) -> None:
        """Ends the stream, if connected, and connects again at once."""
        if self._outbox is not None:
            self._outbox.put(None)

    def forget(self) -> None:
        """Called without a stream, when its sequences continue elsewhere."""
        self._crashes.record_sequences_moved()
        self._end_waits()

    async def run(self, shared_channel: grpc.aio.Channel | None = None) -> None:
        """Connects, and connects again after each break, until cancelled.

        `shared_channel` distributes calls among replicas; then each replica sends its description on the stream.
        Without it each stream has its own channel, since after a take-over a shared connection would still lead to the
        old worker.
        """
        loop = asyncio.get_running_loop()
        timeout_s = self._peers.rpc_timeout_s
        retry_s = FIRST_RETRY_S
        while True:
            start = loop.time()
            try:
                if shared_channel is not None:
                    call = dense_pb2_grpc.DenseWorkerStub(shared_channel).Connect()
                    with _cancelling(call):
                        info = await wait_info(call, timeout_s)
                        self._meet(info)
                        await self._converse(call, info)
                else:
                    async with open_channel(self._address, self._peers.max_message_bytes, self._tls) as channel:
                        stub = dense_pb2_grpc.DenseWorkerStub(channel)
                        info = await ask_info(stub, timeout_s)
                        self._meet(info)
                        await self._converse(stub.Connect(), info)
            except StreamReopened:
                continue
            except PeerError as error:
                self._note_absence(str(error))
            if loop.time() - start > MAX_RETRY_S:  # a stream has broken, or a worker was waited for: again at once
                retry_s = FIRST_RETRY_S
                continue
            await asyncio.sleep(retry_s)
            retry_s = min(2 * retry_s, MAX_RETRY_S)

    def _meet(self, info: dense_pb2.DenseInfo) -> None:
        self._pool.accept(self, served_model(info))
        self.worker = info.epoch
        self._crashes.record_connected(info.epoch)

    async def _converse(self, call: grpc.aio.StreamStreamCall, info: dense_pb2.DenseInfo) -> None:
        sent_parts = SentParts(shares_memory=info.reads_memory_files)
        # No TaskGroup: in Python 3.11 it loses a cancellation if one of its tasks fails at the same time.
        socket = await self._reach_socket(call) if info.offers_socket else None
        self._socket, self._rehearses = socket, info.rehearses
        tasks = [asyncio.create_task(self._read(call, socket))]
        try:
            send = partial(_send, call) if socket is None else partial(_send_by_socket, socket)
            tasks.append(asyncio.create_task(self._write(send, await self._begin(), sent_parts)))
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()  # raises the error that ended the stream
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._socket = None
            if socket is not None:
                socket.abort()  # a worker that has stopped would never read what is left
            await self._end()

    async def _begin(self) -> Outbox:
        """What is to be written first: the sequences that the stream continues, and that these are all.

        Before them: what was flushed, since a new worker may not know it.
        """
        self._pool.assign_orphaned_sequences(self)
        entries = list(self.sequences.unfinished())
        self.num_resubmitted += sum(entry.queue_s is not None for entry in entries)
        resumed = dense_pb2.Resumed(gateway=self.sequences.gateway)
        self._end_waits()
        first: list[Item] = [*entries, dense_pb2.GatewayMessage(resumed=resumed)]
        if self._pool.prefix_generation:
            flushed = dense_pb2.ForgetPrefixes(generation=self._pool.prefix_generation)
            first.insert(0, dense_pb2.GatewayMessage(forget_prefixes=flushed))
            self._await_confirmation()
        self._outbox = Outbox(first)
        self._absence_reason = ""
        log.info("dense worker connected", address=self._address, num_resubmitted=len(entries))
        await self._pool.note_connection(self, True)
        return self._outbox

    async def _end(self) -> None:
        self._outbox = None
        while self._forgetting:
            self._confirm(is_forgotten=False)
        for entry in self.sequences.unfinished():
            self._limit_wait(entry)
        await self._pool.note_connection(self, False)

    async def _reach_socket(self, call: grpc.aio.StreamStreamCall) -> StreamSocket | None:
        """The socket for the messages of a stream; None: it is elsewhere, or there is none, so that they go by gRPC."""
        offer = await wait_offer(call, self._peers.rpc_timeout_s)
        if offer is None:
            return None

        def receive(message: bytes) -> None:
            self._receive(dense_pb2.StepOutput.FromString(message))

        try:
            return await StreamSocket.reach(offer, receive, self._peers.max_message_bytes)
        except OSError as error:
            log.info("messages go by gRPC, not by a socket", address=self._address, reason=str(error))
            return None

    async def _write(self, send: _Send, outbox: Outbox, sent_parts: SentParts) -> None:
        """Writes one message per iteration of the event loop: encoding a long prompt takes a millisecond.

        A search is encoded in a thread. If what it has found is more than a message may have, it fails alone.
        """
        while True:
            message = await outbox.take()
            if message is None:
                raise StreamReopened(f"another worker is looked for at {self._address}")
            if isinstance(message, JournalEntry):
                if message.is_ended or self.sequences.get(message.seq_id) is None:
                    continue  # its request has ended
                if message.request.has_parts:
                    for part in sent_parts.before(message.request):
                        await send(part)
                if message.search is None:
                    message = encode_submit(message)
                else:
                    entry, message = message, await asyncio.to_thread(encode_submit, message)
                    if (error := self._check_size(message)) is not None:
                        entry.fail(error)
                        continue
            await send(message)

    async def _read(self, call: grpc.aio.StreamStreamCall, socket: StreamSocket | None) -> None:
        """Receives all messages; ends with the error that ended the stream."""
        if socket is not None:
            call.add_done_callback(lambda _: asyncio.get_running_loop().call_later(LAST_MESSAGES_S, socket.abort))
            await asyncio.shield(socket.closed)
            if socket.error is not None and not isinstance(socket.error, OSError):
                raise socket.error
        try:
            async with asyncio.timeout(None if socket is None else LAST_MESSAGES_S):
                async for output in call:
                    self._receive(output)
        except grpc.aio.AioRpcError as error:
            raise peer_error(error) from error
        except TimeoutError:
            pass  # why it has closed the socket is not known
        raise PeerError("the dense worker ended the stream")

    def _receive(self, output: dense_pb2.StepOutput) -> None:
        self.num_messages += 1
        if output.reports:  # before the tokens, whose chunks include them
            keep_reports(self.sequences, output)
        if output.HasField("prefix_generation"):
            self._pool.prefix_generation = max(self._pool.prefix_generation, output.prefix_generation)
            self._confirm(is_forgotten=True)
        self._crashes.record_admitted(output.admitted)
        keep_output(self.sequences, output)
        if output.HasField("farewell"):
            self._crashes.record_farewell(output.farewell)
            raise PeerError(output.farewell.reason)

    def _confirm(self, *, is_forgotten: bool) -> None:
        confirmed = self._forgetting.popleft()
        if not confirmed.done():  # its request may have been cancelled
            confirmed.set_result(is_forgotten)

    def _check_size(self, message: dense_pb2.GatewayMessage) -> CapacityError | None:
        num_bytes, most = message.ByteSize(), self._peers.max_message_bytes
        if num_bytes <= most:
            return None
        return CapacityError(
            f"this beam search has lost its worker and cannot go on in another one: its beams and their "
            f"log-probabilities have {num_bytes} bytes, peers.max_message_bytes is {most}"
        )

    def _limit_wait(self, entry: JournalEntry) -> None:
        def give_up() -> None:
            del self._wait_limits[entry.seq_id]
            entry.fail(self.absence())

        loop = asyncio.get_running_loop()
        self._wait_limits[entry.seq_id] = loop.call_later(self._peers.connect_timeout_s, give_up)

    def _end_waits(self) -> None:
        for wait_limit in self._wait_limits.values():
            wait_limit.cancel()
        self._wait_limits.clear()

    def _note_absence(self, reason: str) -> None:
        if reason != self._absence_reason:  # otherwise it was logged at the previous attempt
            write = log.info if self.worker is None else log.warning  # expected at the start
            write("no dense worker", address=self._address, reason=reason)
        self._absence_reason = reason


Item: TypeAlias = JournalEntry | dense_pb2.GatewayMessage | None  # a sequence to submit; None ends the stream


class Outbox:
    """What is still to be written to a dense worker by one stream. `take` is for one caller at a time.

    A request may have hundreds of sequences, and to write one may take milliseconds. So clients take turns: nobody's
    sequence waits until all those of another client are written. Those of a request that share pictures or vectors are
    written together, because a worker forgets these in favour of others'.
    """

    def __init__(self, first: Iterable[Item]) -> None:
        """`first`: what goes before all else, in this order."""
        self._first = deque(first)
        self._groups = ClientQueue[deque[JournalEntry]]()  # of sequences that are written together
        self._group = deque[JournalEntry]()  # whose turn it is
        self._newest = deque[JournalEntry]()  # the one that was added last
        self._has_some = asyncio.Event()
        if self._first:
            self._has_some.set()

    def __bool__(self) -> bool:
        """Whether anything waits."""
        return self._has_some.is_set()

    def put(self, message: dense_pb2.GatewayMessage | None) -> None:
        """Adds a message, which goes before all sequences that wait for their turns.

        It may cancel one of them, which then is not submitted any more.
        """
        self._first.append(message)
        self._has_some.set()

    def submit(self, entry: JournalEntry) -> None:
        """Adds a sequence, which waits for its client's turn."""
        request = entry.request
        if request.has_parts and self._newest and self._newest[-1].request is request:
            self._newest.append(entry)
            return
        self._newest = deque([entry])
        self._groups.put(entry.spec.client_id, self._newest)
        self._has_some.set()

    async def take(self) -> Item:
        """Waits for the next one."""
        await self._has_some.wait()
        if self._first:
            item = self._first.popleft()
        else:
            if not self._group:
                self._group = self._groups.take()
            item = self._group.popleft()
        if not (self._first or self._group or self._groups):
            self._has_some.clear()
        return item


def _is_plain(entry: JournalEntry) -> bool:
    """Whether its message is all that is to be written, and is encoded in less than a millisecond."""
    return entry.search is None and not entry.request.has_parts


_Send = Callable[[dense_pb2.GatewayMessage], Awaitable[None]]


async def _send(call: grpc.aio.StreamStreamCall, message: dense_pb2.GatewayMessage) -> None:
    try:
        await call.write(message)
    except grpc.aio.AioRpcError as error:
        raise peer_error(error) from error
    except asyncio.InvalidStateError as error:
        raise PeerError("the dense worker ended the stream") from error


async def _send_by_socket(socket: StreamSocket, message: dense_pb2.GatewayMessage) -> None:
    socket.send(message.SerializeToString())
    await socket.drain()


@contextlib.contextmanager
def _cancelling(call: grpc.aio.StreamStreamCall) -> Iterator[None]:
    """A context that cancels the call at its end, since a shared channel stays open."""
    try:
        yield
    finally:
        call.cancel()
