"""Sends a workload to a gateway over gRPC and notes when every chunk of every answer arrives.

Runs in one or several client processes, which share the requests in turn and start together. While the load
runs they do no more for a chunk than to keep its bytes and the time: requests are serialized before, chunks
parsed after.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import multiprocessing
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnContext
from typing import Any

import grpc
import uvloop

from bench.stats import NS_PER_S, RequestRecord
from services.pb import gateway_pb2

GENERATE_STREAM = f"/{gateway_pb2.DESCRIPTOR.services_by_name['Gateway'].full_name}/GenerateStream"
CHANNEL_OPTIONS = [("grpc.enable_http_proxy", 0)]
CONNECT_TIMEOUT_S = 10.0
START_DELAY_NS = 100_000_000  # for the start time to reach every process


class LoadError(Exception):
    """The load could not be run at all; single requests that fail are in their records instead."""


@dataclass(frozen=True, slots=True)
class TimedRequest:
    """One request, ready to be sent."""

    index: int  # position in the workload
    due_ns: int  # since the start of the run
    message: bytes  # a serialized GenerateRequest


@dataclass(frozen=True, slots=True)
class Load:
    """What one client process has to do, or all of them together."""

    address: str  # of the gateway
    warmup: list[TimedRequest]  # sent and awaited before the run, whatever their due times
    requests: list[TimedRequest]  # by due time
    max_concurrency: int | None  # requests in flight; one that is due waits for another to end
    request_timeout_s: float


@dataclass(frozen=True, slots=True)
class LoadResult:
    """What one client process saw, or all of them together."""

    records: list[RequestRecord]  # by index
    cpu_s: list[float]  # of each client process, from the start of the run to its last answer


def run_load(load: Load, num_processes: int) -> LoadResult:
    """Runs the load in `num_processes` new processes, each with its share of requests and concurrency.

    Raises `LoadError` if a process cannot connect, a warm-up request fails or a process dies.
    """
    context = multiprocessing.get_context("spawn")  # gRPC does not survive a fork
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(_client(context, share)) for share in shares(load, num_processes)]
        for client in clients:
            _receive(client)  # it is ready
        start_ns = time.monotonic_ns() + START_DELAY_NS  # one clock for all processes of a host
        for client in clients:
            client.send(start_ns)
        results: list[LoadResult] = [_receive(client) for client in clients]
    records = sorted((record for result in results for record in result.records), key=lambda record: record.index)
    return LoadResult(records, [cpu_s for result in results for cpu_s in result.cpu_s])


def shares(load: Load, num_shares: int) -> list[Load]:
    """The load dealt out in turn; `max_concurrency` is divided, so there are at most that many shares."""
    if load.max_concurrency is not None:
        num_shares = min(num_shares, load.max_concurrency)
    return [
        Load(
            load.address,
            load.warmup[share::num_shares],
            load.requests[share::num_shares],
            None if load.max_concurrency is None else (load.max_concurrency + num_shares - 1 - share) // num_shares,
            load.request_timeout_s,
        )
        for share in range(num_shares)
    ]


async def replay(channel: grpc.aio.Channel, load: Load, start_ns: int) -> list[RequestRecord]:
    """Sends `load.requests`, each when it is due after `start_ns` of the monotonic clock, and awaits them all."""
    send = channel.unary_stream(GENERATE_STREAM)  # without (de)serializers: bytes go in and come out
    slots = asyncio.Semaphore(load.max_concurrency or max(1, len(load.requests)))
    answers: list[_Answer] = []

    async def run(request: TimedRequest) -> None:
        answer = _Answer(request.index, request.due_ns, time.monotonic_ns() - start_ns)
        answers.append(answer)
        try:
            async for chunk in send(request.message, timeout=load.request_timeout_s):
                answer.chunk_ns.append(time.monotonic_ns() - start_ns)
                answer.chunks.append(chunk)
        except grpc.aio.AioRpcError as error:
            answer.error = f"{error.code().name}: {error.details()}"
        answer.end_ns = time.monotonic_ns() - start_ns
        slots.release()

    async with asyncio.TaskGroup() as tasks:
        for request in load.requests:
            delay_s = (start_ns + request.due_ns - time.monotonic_ns()) / NS_PER_S
            if delay_s > 0:
                await asyncio.sleep(delay_s)
            await slots.acquire()
            tasks.create_task(run(request))
    return [answer.record() for answer in answers]


class _Answer:
    """One answer as it comes in: times in ns since the start of the run, chunks not yet parsed."""

    def __init__(self, index: int, due_ns: int, send_ns: int) -> None:
        self.index = index
        self.due_ns = due_ns
        self.send_ns = send_ns
        self.end_ns = send_ns
        self.chunk_ns: list[int] = []
        self.chunks: list[bytes] = []
        self.error: str | None = None

    def record(self) -> RequestRecord:
        chunks = [gateway_pb2.GenerateChunk.FromString(chunk) for chunk in self.chunks]
        chunk_num_tokens = [len(chunk.token_ids) for chunk in chunks]
        usage = chunks[-1].finish.usage if chunks else gateway_pb2.Usage()
        if self.error is None:
            self.error = _inconsistency(chunks, sum(chunk_num_tokens))
        return RequestRecord(
            index=self.index,
            scheduled_ns=self.due_ns,
            send_ns=self.send_ns,
            end_ns=self.end_ns,
            chunk_ns=self.chunk_ns,
            chunk_num_tokens=chunk_num_tokens,
            num_prompt_tokens=usage.num_prompt_tokens,
            num_cached_tokens=usage.num_cached_tokens,
            error=self.error,
        )


def _inconsistency(chunks: Sequence[gateway_pb2.GenerateChunk], num_tokens: int) -> str | None:
    if not chunks or not chunks[-1].HasField("finish"):
        return "the stream ended without a finish"
    if num_tokens != chunks[-1].finish.usage.num_output_tokens:
        return f"{num_tokens} tokens came, the server counts {chunks[-1].finish.usage.num_output_tokens}"
    return None


@contextlib.contextmanager
def _client(context: SpawnContext, load: Load) -> Iterator[Connection]:
    """A client process, killed at the end if it still runs."""
    connection, far_end = context.Pipe()
    process = context.Process(target=_run_client, args=(load, far_end), daemon=True)
    process.start()
    far_end.close()  # so that the death of the process is an end of file here
    try:
        yield connection
    finally:
        process.kill()
        process.join()
        connection.close()


def _receive(client: Connection) -> Any:
    try:
        message = client.recv()
    except EOFError:
        raise LoadError("a client process died") from None
    if isinstance(message, LoadError):
        raise message
    return message


def _run_client(load: Load, parent: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's, which kills this process
    try:
        parent.send(uvloop.run(_warm_up_and_replay(load, parent)))
    except LoadError as error:
        parent.send(error)


async def _warm_up_and_replay(load: Load, parent: Connection) -> LoadResult:
    async with grpc.aio.insecure_channel(load.address, options=CHANNEL_OPTIONS) as channel:
        try:
            await asyncio.wait_for(channel.channel_ready(), CONNECT_TIMEOUT_S)
        except TimeoutError:
            raise LoadError(f"no gateway at {load.address} within {CONNECT_TIMEOUT_S:g} s") from None
        await _warm_up(channel, load)
        gc.collect()
        gc.disable()  # a collection would delay every chunk behind it
        parent.send("ready")
        start_ns = await asyncio.to_thread(parent.recv)
        cpu_start_s = time.process_time()
        records = await replay(channel, load, start_ns)
        return LoadResult(records, [time.process_time() - cpu_start_s])


async def _warm_up(channel: grpc.aio.Channel, load: Load) -> None:
    warmup = Load(load.address, [], load.warmup, load.max_concurrency, load.request_timeout_s)
    for record in await replay(channel, warmup, start_ns=0):  # all are due already
        if record.error is not None:
            raise LoadError(f"a warm-up request failed: {record.error}")
