"""Sends a workload to a gateway and records when each chunk of each answer arrives.

It runs in one or several client processes, which get the requests in turn and start together. While the load runs they
only store each chunk's bytes and time: requests are encoded before the run, and chunks are parsed after it.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import multiprocessing
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnContext
from typing import Any

import uvloop

from bench.load.stats import NS_PER_S, RequestRecord
from bench.load.transport import Answer, LoadError, RequestError, TimedRequest, Transport, open_transport, served_model
from services.pb import gateway_pb2

START_DELAY_NS = 100_000_000  # for the start time to reach every process
REPORT_PERIOD_S = 0.5  # of the progress of a client process
MAX_PARSED_CHUNKS = 64  # for a report: less than a millisecond


@dataclass(frozen=True, slots=True)
class Load:
    """The work of one client process, or of all together."""

    protocol: str  # one of PROTOCOLS
    address: str  # of the gateway
    warmup: list[TimedRequest]  # sent and awaited before the run, whatever their due times
    requests: list[TimedRequest]  # by due time
    max_concurrency: int | None  # requests in flight; further due requests wait
    request_timeout_s: float


@dataclass(frozen=True, slots=True)
class LoadResult:
    """The results of one client process, or of all together."""

    records: list[RequestRecord]  # by index
    cpu_s: list[float]  # of each client process, from the start of the run to its last answer


@dataclass(slots=True)
class Progress:
    """What has happened so far in one client process, or in all together."""

    num_sent: int = 0
    num_ended: int = 0  # those that failed included
    num_failed: int = 0
    num_tokens: int = 0  # that came, nearly: see `Monitor`
    num_first_chunks: int = 0
    first_chunk_ns: int = 0  # sum of the times from sending to the first chunk


class Monitor:
    """Watches the answers of one client process.

    To parse every chunk at once would delay the next ones. So the tokens of those that came since the last report are
    counted in the newest of them, and as many are assumed in each of the others.
    """

    def __init__(self, transport: Transport) -> None:
        self.progress = Progress()
        self._transport = transport
        self._num_chunks = 0  # since the last report
        self._newest = deque[bytes](maxlen=MAX_PARSED_CHUNKS)

    def add(self, chunk: bytes) -> None:
        """Notes a chunk."""
        self._num_chunks += 1
        self._newest.append(chunk)

    def report(self) -> Progress:
        """What has happened until now."""
        if self._newest:
            num_tokens = sum(self._transport.parse(self._newest).chunk_num_tokens)
            self.progress.num_tokens += round(num_tokens * self._num_chunks / len(self._newest))
        self._num_chunks = 0
        self._newest.clear()
        return self.progress


def run_load(load: Load, num_processes: int, on_progress: Callable[[Progress], object] | None = None) -> LoadResult:
    """Runs the load in `num_processes` new processes, each with its part of requests and concurrency.

    on_progress: is called about twice a second while the load runs; None: no process reports.

    Raises `LoadError` if a process cannot connect, a warm-up request fails or a process dies.
    """
    context = multiprocessing.get_context("spawn")  # gRPC does not survive a fork
    with contextlib.ExitStack() as stack:
        is_reporting = on_progress is not None
        clients = [stack.enter_context(_client(context, each, is_reporting)) for each in shares(load, num_processes)]
        for client in clients:
            _receive(client)  # it is ready
        start_ns = time.monotonic_ns() + START_DELAY_NS  # one clock for all processes of a host
        for client in clients:
            client.send(start_ns)
        results = _receive_results(clients, on_progress)
    records = sorted((record for result in results for record in result.records), key=lambda record: record.index)
    return LoadResult(records, [cpu_s for result in results for cpu_s in result.cpu_s])


def shares(load: Load, num_shares: int) -> list[Load]:
    """The load divided among processes in turn. `max_concurrency` is divided too, so it limits their number."""
    if load.max_concurrency is not None:
        num_shares = min(num_shares, load.max_concurrency)
    return [
        dataclasses.replace(
            load,
            warmup=load.warmup[share::num_shares],
            requests=load.requests[share::num_shares],
            max_concurrency=(
                None if load.max_concurrency is None else (load.max_concurrency + num_shares - 1 - share) // num_shares
            ),
        )
        for share in range(num_shares)
    ]


async def replay(
    transport: Transport, load: Load, start_ns: int, monitor: Monitor | None = None
) -> list[RequestRecord]:
    """Sends each of `load.requests` when it is due after `start_ns` (monotonic clock), and waits for all.

    `monitor` is told of all that happens.
    """
    monitor = monitor or Monitor(transport)
    progress = monitor.progress
    slots = asyncio.Semaphore(load.max_concurrency or max(1, len(load.requests)))
    logs: list[_AnswerLog] = []

    async def run(request: TimedRequest) -> None:
        log = _AnswerLog(request, start_ns, monitor)
        logs.append(log)
        try:
            await transport.send(request, load.request_timeout_s, log.add)
        except RequestError as error:
            log.error = str(error)
            progress.num_failed += 1
        progress.num_ended += 1
        log.end_ns = time.monotonic_ns() - start_ns
        slots.release()

    async with asyncio.TaskGroup() as tasks:
        for request in load.requests:
            delay_s = (start_ns + request.due_ns - time.monotonic_ns()) / NS_PER_S
            if delay_s > 0:
                await asyncio.sleep(delay_s)
            await slots.acquire()
            tasks.create_task(run(request))
            await asyncio.sleep(0)  # it is sent while the others connect, not after that
    return [log.record(transport.parse(log.chunks)) for log in logs]


class _AnswerLog:
    """One arriving answer: times in ns since the start of the run, chunks not parsed yet."""

    def __init__(self, request: TimedRequest, start_ns: int, monitor: Monitor) -> None:
        self._request = request
        self._monitor = monitor
        monitor.progress.num_sent += 1
        self._start_ns = start_ns
        self._send_ns = self.end_ns = time.monotonic_ns() - start_ns
        self._chunk_ns: list[int] = []
        self.chunks: list[bytes] = []
        self.error: str | None = None

    def add(self, chunk: bytes) -> None:
        now_ns = time.monotonic_ns() - self._start_ns
        if not self._chunk_ns:
            self._monitor.progress.num_first_chunks += 1
            self._monitor.progress.first_chunk_ns += now_ns - self._send_ns
        self._monitor.add(chunk)
        self._chunk_ns.append(now_ns)
        self.chunks.append(chunk)

    def record(self, answer: Answer) -> RequestRecord:
        usage = answer.usage or gateway_pb2.Usage()
        return RequestRecord(
            index=self._request.index,
            scheduled_ns=self._request.due_ns,
            send_ns=self._send_ns,
            end_ns=self.end_ns,
            chunk_ns=self._chunk_ns,
            chunk_num_tokens=answer.chunk_num_tokens,
            num_prompt_tokens=usage.num_prompt_tokens,
            num_cached_tokens=usage.num_cached_tokens,
            error=self.error or answer.error or _inconsistency(answer),
        )


def _inconsistency(answer: Answer) -> str | None:
    if answer.usage is None:
        return "the stream ended without a finish"
    num_tokens = sum(answer.chunk_num_tokens)
    if num_tokens != answer.usage.num_output_tokens:
        return f"{num_tokens} tokens came, the server counts {answer.usage.num_output_tokens}"
    return None


@contextlib.contextmanager
def _client(context: SpawnContext, load: Load, is_reporting: bool) -> Iterator[Connection]:
    """A client process, killed at the end if it still runs."""
    connection, far_end = context.Pipe()
    process = context.Process(target=_run_client, args=(load, far_end, is_reporting), daemon=True)
    process.start()
    far_end.close()  # so that the death of the process is an end of file here
    try:
        yield connection
    finally:
        process.kill()
        process.join()
        connection.close()


def _receive_results(
    clients: list[Connection], on_progress: Callable[[Progress], object] | None
) -> list[LoadResult]:
    """The results of all processes, in their order. Passes on the sum of what they report meanwhile."""
    results: dict[Connection, LoadResult] = {}
    reports = {client: Progress() for client in clients}
    while len(results) < len(clients):
        for client in wait([client for client in clients if client not in results]):
            message = _receive(client)
            if isinstance(message, LoadResult):
                results[client] = message
            else:
                reports[client] = message
        if on_progress is not None:
            fields = zip(*map(dataclasses.astuple, reports.values()), strict=True)
            on_progress(Progress(*map(sum, fields)))
    return [results[client] for client in clients]


def _receive(client: Connection) -> Any:
    try:
        message = client.recv()
    except EOFError:
        raise LoadError("a client process died") from None
    if isinstance(message, LoadError):
        raise message
    return message


def _run_client(load: Load, parent: Connection, is_reporting: bool) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C and kills this process
    try:
        parent.send(uvloop.run(_warm_up_and_replay(load, parent, is_reporting)))
    except LoadError as error:
        parent.send(error)


async def _warm_up_and_replay(load: Load, parent: Connection, is_reporting: bool) -> LoadResult:
    async with open_transport(load.protocol, load.address) as transport:
        await served_model(transport, load.address)  # connects
        await _warm_up(transport, load)
        gc.collect()
        gc.disable()  # a collection would delay every chunk behind it
        parent.send("ready")
        start_ns = await asyncio.to_thread(parent.recv)
        cpu_start_s = time.process_time()
        monitor = Monitor(transport)
        reports = asyncio.create_task(_report(parent, monitor)) if is_reporting else None
        records = await replay(transport, load, start_ns, monitor)
        if reports is not None:
            reports.cancel()
            parent.send(monitor.report())
        return LoadResult(records, [time.process_time() - cpu_start_s])


async def _report(parent: Connection, monitor: Monitor) -> None:
    while True:
        await asyncio.sleep(REPORT_PERIOD_S)
        parent.send(monitor.report())


async def _warm_up(transport: Transport, load: Load) -> None:
    warmup = dataclasses.replace(load, requests=load.warmup)
    for record in await replay(transport, warmup, start_ns=0):  # all are due already
        if record.error is not None:
            raise LoadError(f"a warm-up request failed: {record.error}")
