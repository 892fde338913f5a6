"""One stream of the gateway to a dense worker: sequences out, the tokens of every step in.

Runs in the gateway's event loop. While a stream is up, one task writes and one reads. When it breaks,
the client connects again and continues every open sequence from the journal; requests see a pause.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import grpc
import structlog

from services.common.config import PeerSection
from services.common.dense_info import read_dense_info
from services.common.errors import (
    CapacityError,
    InvalidRequest,
    NotFound,
    PeerError,
    QueueTimeout,
    RequestAborted,
    TwostrokeError,
)
from services.common.sampling_messages import encode_sampling
from services.common.token_logprobs import decode_logprobs
from services.gateway.link.crash_record import CrashRecord
from services.gateway.link.journal import FinishReason, Journal, JournalEntry
from services.pb import dense_pb2, dense_pb2_grpc
from services.rpc.client import open_channel, read_peer_tls

if TYPE_CHECKING:
    from services.gateway.link.dense_pool import Share

log = structlog.get_logger()

FIRST_RETRY_S = 0.05
MAX_RETRY_S = 0.4
FINISH_REASONS = {
    dense_pb2.SequenceEnd.STOP: FinishReason.STOP,
    dense_pb2.SequenceEnd.LENGTH: FinishReason.LENGTH,
}
SEQUENCE_ERRORS: dict[int, type[TwostrokeError]] = {
    error_class.status_code.value[0]: error_class
    for error_class in (InvalidRequest, CapacityError, NotFound, PeerError, QueueTimeout, RequestAborted)
}

MAX_DECODED_TOKENS = 512  # of prompts, with their log-probabilities, in one turn of the event loop: about 3 ms

_Outbox = asyncio.Queue[JournalEntry | dense_pb2.GatewayMessage | None]  # entries to submit; None ends the stream


class StreamReopened(PeerError):
    """The gateway itself ended a stream, to look for another worker."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What the dense worker says it serves."""

    family: str
    dtype: str
    vocab_size: int  # token ids
    num_layers: int
    max_model_len: int  # tokens of prompt and output together
    weights_hash: str  # hexadecimal


class DenseClient:
    """Keeps the stream up while `run` runs; `on_connection(is_connected)` is awaited at each change.

    A sequence waits for a lost dense worker for `peers.connect_timeout_s`, then fails with `PeerError`.
    """

    def __init__(
        self,
        address: str,
        peers: PeerSection,
        journal: Journal | Share,
        on_connection: Callable[[bool], Awaitable[None]],
        *,
        accept: Callable[[ServedModel], None] | None = None,
        adopt: Callable[[], None] | None = None,
    ) -> None:
        """`accept` may refuse a worker by a `PeerError`; `adopt` may add to the sequences that will continue."""
        self._address = address
        self._peers = peers
        self._tls = read_peer_tls(peers)
        self._journal = journal
        self._on_connection = on_connection
        self._crashes = CrashRecord(journal)
        self._accept = accept or self._accept_any
        self._adopt = adopt
        self._model: ServedModel | None = None
        self.worker = 0  # epoch of the dense worker at the other end, while there is a stream
        self.num_resubmitted = 0  # sequences that were under way when a stream broke, in all
        self.num_messages = 0  # from the dense worker, in all
        self._is_connected = asyncio.Event()
        self._outbox: _Outbox | None = None  # None: no stream
        self._wait_limits: dict[int, asyncio.TimerHandle] = {}  # by seq_id, while there is no stream
        self._absence_reason = ""  # while there is no stream

    async def wait_connected(self) -> None:
        """Returns once the stream is up. Raises `PeerError` after `peers.connect_timeout_s`."""
        try:
            async with asyncio.timeout(self._peers.connect_timeout_s):
                await self._is_connected.wait()
        except TimeoutError:
            raise self.absence() from None

    @property
    def has_model(self) -> bool:
        """Whether the dense worker has answered once."""
        return self._model is not None

    @property
    def is_connected(self) -> bool:
        """Whether the stream is up."""
        return self._is_connected.is_set()

    @property
    def model(self) -> ServedModel:
        """What is served. Raises `PeerError` until the dense worker has answered once."""
        if self._model is None:
            raise PeerError(f"dense worker at {self._address} is not connected yet")
        return self._model

    def unready_reason(self) -> str | None:
        """Why no sequence could run now; None: they can."""
        if self._outbox is not None:
            return None
        return f"no dense worker at {self._address}: {self._absence_reason or 'not connected yet'}"

    def submit(self, entry: JournalEntry) -> None:
        """Starts a sequence of the journal, now or as soon as there is a stream."""
        if self._outbox is not None:
            self._outbox.put_nowait(entry)
        else:
            self._limit_wait(entry)

    def cancel(self, entry: JournalEntry) -> None:
        """Makes the dense worker forget a sequence; without a stream it has forgotten all of them."""
        if self._outbox is not None:
            self._outbox.put_nowait(dense_pb2.GatewayMessage(cancel=dense_pb2.Cancel(seq_id=entry.seq_id)))
        elif entry.seq_id in self._wait_limits:
            self._wait_limits.pop(entry.seq_id).cancel()

    def resubmit(self, entry: JournalEntry) -> None:
        """Continues a sequence that ran on another stream."""
        self.num_resubmitted += entry.queue_s is not None
        self.submit(entry)

    def reopen(self) -> None:
        """Ends the stream, if there is one, and connects again at once."""
        if self._outbox is not None:
            self._outbox.put_nowait(None)

    def forget(self) -> None:
        """Its sequences go on elsewhere; there is no stream."""
        self._crashes.left()
        for wait_limit in self._wait_limits.values():
            wait_limit.cancel()
        self._wait_limits.clear()

    async def run(self, shared_channel: grpc.aio.Channel | None = None) -> None:
        """Connects, and connects again after each break, until cancelled.

        `shared_channel` takes turns among replicas, and then each of them says itself who it is. Without it there
        is a channel for each stream: after a take-over the old worker's connection would still be up.
        """
        loop = asyncio.get_running_loop()
        retry_s = FIRST_RETRY_S
        while True:
            start = loop.time()
            try:
                if shared_channel is not None:
                    call = dense_pb2_grpc.DenseWorkerStub(shared_channel).Connect()
                    with _cancelling(call):
                        self._meet(await self._answered(call))
                        await self._converse(call)
                else:
                    async with open_channel(self._address, self._peers.max_message_bytes, self._tls) as channel:
                        stub = dense_pb2_grpc.DenseWorkerStub(channel)
                        self._meet(await self._ask(stub))
                        await self._converse(stub.Connect())
            except StreamReopened:
                continue
            except PeerError as error:
                self._note_absence(str(error))
            is_quick = loop.time() - start < MAX_RETRY_S
            retry_s = min(2 * retry_s, MAX_RETRY_S) if is_quick else FIRST_RETRY_S
            await asyncio.sleep(retry_s)

    async def _ask(self, stub: dense_pb2_grpc.DenseWorkerStub) -> dense_pb2.DenseInfo:
        try:
            return await stub.GetInfo(dense_pb2.GetInfoRequest(), timeout=self._peers.rpc_timeout_s)
        except grpc.aio.AioRpcError as error:
            raise _peer_error(error) from error

    async def _answered(self, call: grpc.aio.StreamStreamCall) -> dense_pb2.DenseInfo:
        """Who took the call: one of several workers, so that nobody else could tell."""
        timeout_s = self._peers.rpc_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                info = read_dense_info(await call.initial_metadata())
                if info is None:  # the call has failed
                    raise PeerError(f"{(await call.code()).name}: {await call.details()}")
                return info
        except TimeoutError:
            raise PeerError(f"no dense worker took the stream within {timeout_s:g} s") from None
        except grpc.aio.AioRpcError as error:
            raise _peer_error(error) from error

    def _meet(self, info: dense_pb2.DenseInfo) -> None:
        model = ServedModel(
            family=info.family,
            dtype=info.dtype,
            vocab_size=info.vocab_size,
            num_layers=info.num_layers,
            max_model_len=info.max_model_len,
            weights_hash=info.weights_hash,
        )
        self._accept(model)
        self._model = model
        self.worker = info.epoch
        self._crashes.connected(info.epoch)

    def _accept_any(self, model: ServedModel) -> None:
        if self._model is not None and self._model.weights_hash != model.weights_hash:
            for entry in self._journal.unfinished():
                entry.fail(RequestAborted("the dense worker came back with other weights"))

    async def _converse(self, call: grpc.aio.StreamStreamCall) -> None:
        outbox: _Outbox = asyncio.Queue()
        # No TaskGroup: that of Python 3.11 forgets that it was cancelled if one of its tasks fails just then.
        tasks = [asyncio.create_task(self._read(call)), asyncio.create_task(self._write(call, outbox))]
        try:
            await self._begin(outbox)
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()  # raises what ended the stream
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._end()

    async def _begin(self, outbox: _Outbox) -> None:
        if self._adopt is not None:
            self._adopt()
        for entry in self._journal.unfinished():
            outbox.put_nowait(entry)
            self.num_resubmitted += entry.queue_s is not None
        num_resubmitted = outbox.qsize()
        resumed = dense_pb2.Resumed(gateway=self._journal.instance)
        outbox.put_nowait(dense_pb2.GatewayMessage(resumed=resumed))
        for wait_limit in self._wait_limits.values():
            wait_limit.cancel()
        self._wait_limits.clear()
        self._outbox = outbox
        self._is_connected.set()
        self._absence_reason = ""
        log.info("dense worker connected", address=self._address, num_resubmitted=num_resubmitted)
        await self._on_connection(True)

    async def _end(self) -> None:
        self._outbox = None
        self._is_connected.clear()
        for entry in self._journal.unfinished():
            self._limit_wait(entry)
        await self._on_connection(False)

    async def _write(self, call: grpc.aio.StreamStreamCall, outbox: _Outbox) -> None:
        """One message a turn of the event loop: those of long prompts take a millisecond each to make."""
        while True:
            message = await outbox.get()
            if message is None:
                raise StreamReopened(f"another worker is looked for at {self._address}")
            if isinstance(message, JournalEntry):
                if message.is_ended or self._journal.get(message.seq_id) is None:
                    continue  # nobody waits for it any more
                message = _submit_message(message)
            try:
                await call.write(message)
            except grpc.aio.AioRpcError as error:
                raise _peer_error(error) from error
            except asyncio.InvalidStateError as error:
                raise PeerError("the dense worker ended the stream") from error

    async def _read(self, call: grpc.aio.StreamStreamCall) -> None:
        try:
            async for output in call:
                self.num_messages += 1
                if output.prompt_logprobs:  # before the tokens: the first one's chunk tells them
                    await self._keep_prompt_logprobs(output.prompt_logprobs)
                self._dispatch(output)
                if output.HasField("farewell"):
                    self._crashes.farewell(output.farewell)
                    raise PeerError(output.farewell.reason)
        except grpc.aio.AioRpcError as error:
            raise _peer_error(error) from error
        raise PeerError("the dense worker ended the stream")

    async def _keep_prompt_logprobs(self, spans: Sequence[dense_pb2.PromptLogprobs]) -> None:
        """A little at a time: a step's take longer to decode than others' streams may wait."""
        for span in spans:
            for first in range(0, len(span.tokens), MAX_DECODED_TOKENS):
                entry = self._journal.get(span.seq_id)
                if entry is None:
                    break
                tokens = span.tokens[first : first + MAX_DECODED_TOKENS]
                entry.set_prompt_logprobs(span.start + first, [decode_logprobs(token) for token in tokens])
                await asyncio.sleep(0)

    def _dispatch(self, output: dense_pb2.StepOutput) -> None:
        """Hands a step's tokens to their sequences; closed ones are no longer in the journal."""
        find, now = self._journal.get, time.monotonic()
        self._crashes.admitted(output.admitted)
        for start in output.started:
            entry = find(start.seq_id)
            if entry is not None:
                entry.start(start.queue_us / 1e6, start.num_cached_tokens)
        for each in output.logprobs:
            entry = find(each.seq_id)
            if entry is not None:
                entry.logprobs.append(decode_logprobs(each.token))
        for seq_id, token_id in zip(output.seq_ids, output.token_ids, strict=True):
            entry = find(seq_id)
            if entry is not None:
                entry.append(token_id, now)
        for end in output.ended:
            entry = find(end.seq_id)
            if entry is None or entry.is_ended:
                continue
            finish_reason = FINISH_REASONS.get(end.reason)
            if finish_reason is not None:
                entry.finish(finish_reason)
            else:
                entry.fail(SEQUENCE_ERRORS.get(end.status_code, TwostrokeError)(end.message))

    def _limit_wait(self, entry: JournalEntry) -> None:
        def give_up() -> None:
            del self._wait_limits[entry.seq_id]
            entry.fail(self.absence())

        loop = asyncio.get_running_loop()
        self._wait_limits[entry.seq_id] = loop.call_later(self._peers.connect_timeout_s, give_up)

    def _note_absence(self, reason: str) -> None:
        if reason != self._absence_reason:  # else it was logged at the attempt before
            write = log.info if self._model is None else log.warning  # at the start it is no surprise
            write("no dense worker", address=self._address, reason=reason)
        self._absence_reason = reason

    def absence(self) -> PeerError:
        """What a sequence fails with that waited in vain."""
        timeout_s = self._peers.connect_timeout_s
        return PeerError(f"no dense worker at {self._address} within {timeout_s:g} s: {self._absence_reason}")


@contextlib.contextmanager
def _cancelling(call: grpc.aio.StreamStreamCall) -> Iterator[None]:
    """A shared channel does not end with the stream, so the call has to."""
    try:
        yield
    finally:
        call.cancel()


def _submit_message(entry: JournalEntry) -> dense_pb2.GatewayMessage:
    request = entry.request
    return dense_pb2.GatewayMessage(
        submit=dense_pb2.Submit(
            seq_id=entry.seq_id,
            request_id=request.request_id,
            prompt_token_ids=request.prompt_token_ids,
            output_token_ids=entry.output_token_ids,
            sampling=encode_sampling(entry.sampling),
            max_tokens=max(1, request.max_tokens),  # 0: see `JournalEntry.finish`
            stop_token_ids=request.stop_token_ids,
            cache_salt=request.cache_salt,
            num_logprobs=request.num_computed_logprobs,
            num_prompt_logprobs=entry.wanted_prompt_logprobs,
            priority=request.priority,
            queue_timeout_ms=entry.queue_timeout_ms,
            traceparent=request.traceparent,
            num_crashes=entry.num_crashes,
        )
    )


def _peer_error(error: grpc.aio.AioRpcError) -> PeerError:
    return PeerError(f"{error.code().name}: {error.details()}")
