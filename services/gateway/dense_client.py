"""The gateway's one stream to the dense worker: sequences out, the tokens of every step in.

Runs in the gateway's event loop. While a stream is up, one task writes and one reads. When it breaks,
the client connects again and continues every open sequence from the journal; requests see a pause.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import grpc
import structlog

from services.common.client import open_channel
from services.common.config import PeerSection
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
from services.common.watchdog import describe_stall
from services.gateway.crash_record import CrashRecord
from services.gateway.journal import FinishReason, Journal, JournalEntry
from services.gateway.request import GenerationRequest
from services.pb import dense_pb2, dense_pb2_grpc, stall_pb2

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

_Outbox = asyncio.Queue[dense_pb2.GatewayMessage]


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
        journal: Journal,
        on_connection: Callable[[bool], Awaitable[None]],
    ) -> None:
        self._address = address
        self._peers = peers
        self._journal = journal
        self._on_connection = on_connection
        self._crashes = CrashRecord(journal)
        self._model: ServedModel | None = None
        self.num_resubmitted = 0  # sequences that were under way when a stream broke, in all
        self.num_messages = 0  # from the dense worker, in all
        self.stall: stall_pb2.Stall | None = None  # that the gateway's watchdog sees
        self._is_connected = asyncio.Event()
        self._outbox: _Outbox | None = None  # None: no stream
        self._wait_limits: list[asyncio.TimerHandle] = []  # one a waiting sequence, while there is no stream
        self._absence_reason = ""  # while there is no stream

    async def wait_connected(self) -> None:
        """Returns once the stream is up. Raises `PeerError` after `peers.connect_timeout_s`."""
        try:
            async with asyncio.timeout(self._peers.connect_timeout_s):
                await self._is_connected.wait()
        except TimeoutError:
            raise self._absence() from None

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
            return None if self.stall is None else describe_stall(self.stall)
        return f"no dense worker at {self._address}: {self._absence_reason or 'not connected yet'}"

    def submit(self, entry: JournalEntry) -> None:
        """Starts a sequence of the journal, now or as soon as there is a stream."""
        if self._outbox is not None:
            self._outbox.put_nowait(_submit_message(entry))
        else:
            self._limit_wait(entry)

    def cancel(self, entry: JournalEntry) -> None:
        """Makes the dense worker forget a sequence; without a stream it has forgotten all of them."""
        if self._outbox is not None:
            self._outbox.put_nowait(dense_pb2.GatewayMessage(cancel=dense_pb2.Cancel(seq_id=entry.seq_id)))

    async def run(self) -> None:
        """Connects, and connects again after each break, until cancelled."""
        loop = asyncio.get_running_loop()
        retry_s = FIRST_RETRY_S
        while True:
            start = loop.time()
            try:
                # A channel for each stream: after a take-over the old worker's connection would still be up.
                async with open_channel(self._address, self._peers.max_message_bytes) as channel:
                    stub = dense_pb2_grpc.DenseWorkerStub(channel)
                    await self._meet(stub)
                    await self._converse(stub)
            except PeerError as error:
                self._note_absence(str(error))
            is_quick = loop.time() - start < MAX_RETRY_S
            retry_s = min(2 * retry_s, MAX_RETRY_S) if is_quick else FIRST_RETRY_S
            await asyncio.sleep(retry_s)

    async def _meet(self, stub: dense_pb2_grpc.DenseWorkerStub) -> None:
        try:
            info = await stub.GetInfo(dense_pb2.GetInfoRequest(), timeout=self._peers.rpc_timeout_s)
        except grpc.aio.AioRpcError as error:
            raise _peer_error(error) from error
        model = ServedModel(
            family=info.family,
            dtype=info.dtype,
            vocab_size=info.vocab_size,
            num_layers=info.num_layers,
            max_model_len=info.max_model_len,
            weights_hash=info.weights_hash,
        )
        if self._model is not None and self._model.weights_hash != model.weights_hash:
            for entry in self._journal.unfinished():
                entry.fail(RequestAborted("the dense worker came back with other weights"))
        self._model = model
        self._crashes.connected(info.epoch)

    async def _converse(self, stub: dense_pb2_grpc.DenseWorkerStub) -> None:
        call = stub.Connect()
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
        for entry in self._journal.unfinished():
            outbox.put_nowait(_submit_message(entry))
            self.num_resubmitted += entry.queue_s is not None
        num_resubmitted = outbox.qsize()
        resumed = dense_pb2.Resumed(gateway=self._journal.instance)
        outbox.put_nowait(dense_pb2.GatewayMessage(resumed=resumed))
        for wait_limit in self._wait_limits:
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
        while True:
            message = await outbox.get()
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
                self._dispatch(output)
                if output.HasField("farewell"):
                    self._crashes.farewell(output.farewell.is_crash)
                    raise PeerError(output.farewell.reason)
        except grpc.aio.AioRpcError as error:
            raise _peer_error(error) from error
        raise PeerError("the dense worker ended the stream")

    def _dispatch(self, output: dense_pb2.StepOutput) -> None:
        """Hands a step's tokens to their sequences; closed ones are no longer in the journal."""
        find, now = self._journal.get, time.monotonic()
        self._crashes.admitted(output.admitted)
        for start in output.started:
            entry = find(start.seq_id)
            if entry is not None:
                entry.start(start.queue_us / 1e6, start.num_cached_tokens)
        for stretch in output.prompt_logprobs:
            entry = find(stretch.seq_id)
            if entry is not None:
                entry.set_prompt_logprobs(stretch.start, [decode_logprobs(token) for token in stretch.tokens])
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
            entry.fail(self._absence())

        loop = asyncio.get_running_loop()
        self._wait_limits.append(loop.call_later(self._peers.connect_timeout_s, give_up))

    def _note_absence(self, reason: str) -> None:
        if reason != self._absence_reason:  # else it was logged at the attempt before
            write = log.info if self._model is None else log.warning  # at the start it is no surprise
            write("no dense worker", address=self._address, reason=reason)
        self._absence_reason = reason

    def _absence(self) -> PeerError:
        timeout_s = self._peers.connect_timeout_s
        return PeerError(f"no dense worker at {self._address} within {timeout_s:g} s: {self._absence_reason}")


def _submit_message(entry: JournalEntry) -> dense_pb2.GatewayMessage:
    request = entry.request
    return dense_pb2.GatewayMessage(
        submit=dense_pb2.Submit(
            seq_id=entry.seq_id,
            request_id=request.request_id,
            prompt_token_ids=request.prompt_token_ids,
            output_token_ids=entry.output_token_ids,
            sampling=encode_sampling(entry.sampling),
            max_tokens=request.max_tokens,
            stop_token_ids=request.stop_token_ids,
            cache_salt=request.cache_salt,
            num_logprobs=_num_logprobs(request),
            num_prompt_logprobs=entry.wanted_prompt_logprobs,
            priority=request.priority,
            queue_timeout_ms=_queue_timeout_ms(entry),
            traceparent=request.traceparent,
            num_crashes=entry.num_crashes,
        )
    )


def _queue_timeout_ms(entry: JournalEntry) -> int:
    """What is left of the time it may wait; 0, for ever, once it has run."""
    limit_s = entry.request.queue_timeout_s
    if limit_s is None or entry.queue_s is not None:
        return 0
    return max(1, round(1e3 * (entry.arrival + limit_s - time.monotonic())))


def _num_logprobs(request: GenerationRequest) -> int | None:
    """As asked for; to choose the best of several answers takes the tokens' own."""
    return 0 if request.num_logprobs is None and request.best_of > request.n else request.num_logprobs


def _peer_error(error: grpc.aio.AioRpcError) -> PeerError:
    return PeerError(f"{error.code().name}: {error.details()}")
