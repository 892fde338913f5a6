"""Sends token ids directly to a dense worker, over the stream that gateways use, and records when each token arrives.

The whole load shares one event loop and one stream, so a step costs one message, however many requests run. On the
dense worker's host its messages go by a socket, as those of gateways do.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import secrets
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import grpc

from bench.load.grpc_transport import CHANNEL_OPTIONS
from bench.load.stats import NS_PER_S, RequestRecord
from bench.load.transport import CONNECT_TIMEOUT_S, LoadError
from services.common.config import MAX_MESSAGE_BYTES
from services.common.errors import PeerError
from services.pb import dense_pb2, dense_pb2_grpc, sampling_pb2, sequence_pb2
from services.rpc.stream_socket import StreamSocket, read_offer

FIRST_SEQ_ID = 1
_REASON_S = 1.0  # for a stream to end after its socket

_Send = Callable[[dense_pb2.GatewayMessage], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class DenseRequest:
    """One request and when it is due, in seconds since the start of the run."""

    token_ids: list[int]
    max_tokens: int
    due_s: float
    stop_token_ids: tuple[int, ...] = ()


@dataclass(slots=True)
class _Answer:
    """One arriving answer; times in ns since the start of the run."""

    request: DenseRequest
    send_ns: int = 0
    end_ns: int = 0
    token_ns: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    num_cached_tokens: int = 0
    error: str | None = None
    is_ended: bool = False


class DenseLoad:
    """A connection to a dense worker. `replay` may be called several times."""

    def __init__(self, channel: grpc.aio.Channel, temperature: float, cache_salt: str) -> None:
        self._stub = dense_pb2_grpc.DenseWorkerStub(channel)
        self._sampling = sampling_pb2.SamplingParams(temperature=temperature, seed=0)
        self._salt = cache_salt
        self._next_seq_id = secrets.randbits(31) << 32 | FIRST_SEQ_ID  # no gateway has such ids

    async def info(self) -> dense_pb2.DenseInfo:
        """The served model and its limits. Raises `LoadError`."""
        try:
            return await self._stub.GetInfo(dense_pb2.GetInfoRequest(), timeout=CONNECT_TIMEOUT_S, wait_for_ready=True)
        except grpc.aio.AioRpcError as error:
            raise LoadError(f"the dense worker: {error.code().name}: {error.details()}") from error

    async def replay(
        self, requests: Sequence[DenseRequest], max_concurrency: int | None, timeout_s: float
    ) -> tuple[list[RequestRecord], list[list[int]]]:
        """Sends each request when it is due and waits for all. Returns records and output tokens, in order.

        While `max_concurrency` requests run, due requests wait. Raises `LoadError` if the stream breaks or the
        run takes longer than `timeout_s`.
        """
        answers: dict[int, _Answer] = {}
        first_seq_id = self._next_seq_id
        for request in requests:
            answers[self._next_seq_id] = _Answer(request)
            self._next_seq_id += 1
        slots = asyncio.Semaphore(max_concurrency or max(1, len(requests)))
        call = self._stub.Connect()
        reader = _Reader(answers, slots)
        try:
            async with asyncio.timeout(timeout_s):
                socket = await _reach_socket(call, reader)
                gc.collect()
                gc.disable()  # a collection would delay every token behind it
                start_ns = reader.start_ns = time.monotonic_ns()
                send = call.write if socket is None else partial(_send_by_socket, socket)
                await _together(reader.read(call, socket), self._write(send, answers, slots, start_ns))
        except TimeoutError:
            raise LoadError(f"the run was not over after {timeout_s:g} s") from None
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError, PeerError) as error:
            raise LoadError(f"the stream to the dense worker broke: {error}") from error
        finally:
            gc.enable()
            call.cancel()
        records = [_record(seq_id - first_seq_id, answer) for seq_id, answer in answers.items()]
        return records, [answer.token_ids for answer in answers.values()]

    async def _write(
        self, send: _Send, answers: dict[int, _Answer], slots: asyncio.Semaphore, start_ns: int
    ) -> None:
        for seq_id, answer in answers.items():
            due_ns = start_ns + round(answer.request.due_s * NS_PER_S)
            while (delay_ns := due_ns - time.monotonic_ns()) > 0:  # noqa: ASYNC110  uvloop wakes up to 1 ms early
                await asyncio.sleep(delay_ns / NS_PER_S)
            await slots.acquire()
            answer.send_ns = time.monotonic_ns() - start_ns
            await send(self._submit(seq_id, answer.request))

    def _submit(self, seq_id: int, request: DenseRequest) -> dense_pb2.GatewayMessage:
        return dense_pb2.GatewayMessage(
            submit=dense_pb2.Submit(
                seq_id=seq_id,
                spec=sequence_pb2.SequenceSpec(
                    request_id=f"core-{seq_id:x}",
                    prompt_token_ids=request.token_ids,
                    sampling=self._sampling,
                    max_tokens=request.max_tokens,
                    stop_token_ids=request.stop_token_ids,
                    cache_salt=self._salt,
                ),
            )
        )


def open_dense(address: str) -> grpc.aio.Channel:
    """A channel for `DenseLoad`."""
    return grpc.aio.insecure_channel(address, options=[*CHANNEL_OPTIONS, ("grpc.max_receive_message_length", -1)])


class _Reader:
    """Notes what comes for each answer."""

    def __init__(self, answers: Mapping[int, _Answer], slots: asyncio.Semaphore) -> None:
        self.start_ns = 0  # of the run
        self._answers, self._slots = answers, slots
        self._num_open = len(answers)
        self._have_ended = asyncio.get_running_loop().create_future()

    async def read(self, call: grpc.aio.StreamStreamCall, socket: StreamSocket | None) -> None:
        """Reads all answers to their ends. Raises `LoadError` if the stream ends before."""
        if socket is not None:
            await asyncio.wait([self._have_ended, socket.closed], return_when=asyncio.FIRST_COMPLETED)
            socket.abort()
            if not self._have_ended.done():
                await _raise_reason(call, socket)
        else:
            async for output in call:
                self.take(output)
                if self._have_ended.done():
                    break
        if not self._have_ended.done():
            raise LoadError("the dense worker ended the stream")

    def take(self, output: dense_pb2.StepOutput) -> None:
        now_ns = time.monotonic_ns() - self.start_ns
        answers = self._answers
        for start in output.started:
            answers[start.seq_id].num_cached_tokens = start.num_cached_tokens
        for seq_id, token_id in zip(output.seq_ids, output.token_ids, strict=True):
            answer = answers[seq_id]
            answer.token_ns.append(now_ns)
            answer.token_ids.append(token_id)
        for end in output.ended:
            answer = answers[end.seq_id]
            answer.end_ns, answer.is_ended = now_ns, True
            if end.reason == dense_pb2.SequenceEnd.ERROR:
                answer.error = end.message
            self._slots.release()
            self._num_open -= 1
        if not self._num_open and not self._have_ended.done():
            self._have_ended.set_result(None)


async def _raise_reason(call: grpc.aio.StreamStreamCall, socket: StreamSocket) -> None:
    """Raises the error for which the socket was closed too early, if it is known: the stream ends with the worker's."""
    if socket.error is not None and not isinstance(socket.error, OSError):
        raise LoadError(f"a message of the dense worker cannot be read: {socket.error!r}") from socket.error
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_REASON_S):
            async for _ in call:
                pass


async def _reach_socket(call: grpc.aio.StreamStreamCall, reader: _Reader) -> StreamSocket | None:
    """The socket for the messages of a stream, as gateways use it. None, which it says: it cannot be reached, so that
    they go by gRPC, and take longer.
    """
    offer = read_offer(await call.initial_metadata() or ())
    if offer is None:
        print("Messages go by gRPC: the dense worker offers no socket.", file=sys.stderr)
        return None

    def receive(message: bytes) -> None:
        reader.take(dense_pb2.StepOutput.FromString(message))

    try:
        return await StreamSocket.reach(offer, receive, MAX_MESSAGE_BYTES)
    except OSError as error:
        print(f"Messages go by gRPC: the dense worker's socket cannot be reached: {error!r}", file=sys.stderr)
        return None


async def _send_by_socket(socket: StreamSocket, message: dense_pb2.GatewayMessage) -> None:
    socket.send(message.SerializeToString())
    await socket.drain()


async def _together(*coroutines: Coroutine[None, None, None]) -> None:
    """Runs all coroutines. The first error cancels the others and is raised."""
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        for task in (await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION))[0]:
            task.result()
    finally:
        for task in tasks:
            task.cancel()


def _record(index: int, answer: _Answer) -> RequestRecord:
    return RequestRecord(
        index=index,
        scheduled_ns=round(answer.request.due_s * NS_PER_S),
        send_ns=answer.send_ns,
        end_ns=answer.end_ns,
        chunk_ns=answer.token_ns,
        chunk_num_tokens=[1] * len(answer.token_ns),
        num_prompt_tokens=len(answer.request.token_ids),
        num_cached_tokens=answer.num_cached_tokens,
        error=answer.error,
    )
