"""What a client waits while another one has hundreds of streams, and how evenly two such clients share the server.

    python bench/fairness.py --num-streams 500                          # on this machine, with the embedded model
    python bench/fairness.py --shape llama-2-7b --seconds 10            # on a GPU, with random weights

Clients differ by the metadata `x-forwarded-for`, which the server believes: a running one (`--address`) needs
`gateway.trusted_proxies`. All ratios are of one run. The streams run in a process of their own, so that they delay no
measurement here.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import multiprocessing
import statistics
import sys
import time
from collections.abc import AsyncIterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import grpc

from bench.load.options import whole_number
from bench.load.own_server import add_server_options, open_server
from services.pb import gateway_pb2, gateway_pb2_grpc, sampling_pb2

HEAVY, OTHER, NEWCOMER = "198.51.100.1", "198.51.100.2", "198.51.100.3"
CONNECT_TIMEOUT_S = 10.0
START_TIMEOUT_S = 120.0
PAUSE_S = 0.05  # between two requests of the newcomer
MAX_RATIO = 1.5  # of the newcomer's first token, less a step, to that of an idle server
Counts = dict[str, tuple[int, float]]  # by client: tokens so far, and the median time between two of a stream


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0, or 1 if the newcomer waits too long."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_server_options(parser)
    parser.add_argument("--num-streams", type=whole_number, default=500)
    parser.add_argument("--num-requests", type=whole_number, default=40, help="of the newcomer, one after the other")
    parser.add_argument("--prompt-len", type=whole_number, default=32, help="tokens of every prompt")
    parser.add_argument("--output-len", type=whole_number, default=1000, help="tokens of every stream")
    parser.add_argument("--seconds", type=whole_number, default=20, help="for which two clients share the server")
    arguments = parser.parse_args(argv)
    with open_server(arguments, 'gateway.trusted_proxies=["unix"]') as server:
        arguments.address = server.address
        figures = asyncio.run(_run(arguments))
    print(json.dumps(figures, indent=2))
    return 0 if figures["first_token_ratio"] <= MAX_RATIO else 1


def jain_index(counts: Sequence[float]) -> float:
    """1 if all are equal, 1/n if one has everything: https://en.wikipedia.org/wiki/Fairness_measure."""
    return sum(counts) ** 2 / (len(counts) * sum(count * count for count in counts))


async def _run(arguments: argparse.Namespace) -> dict[str, float]:
    async with _open(arguments.address) as stub:
        await _first_token_s(stub, arguments.prompt_len)  # warms up
        idle = await _first_tokens_s(stub, arguments)
        with _streams(arguments, {HEAVY: arguments.num_streams}) as load:
            await _until_all_wait(load)
            before = _counts(load)[HEAVY][0]
            start = time.monotonic()
            loaded = await _first_tokens_s(stub, arguments)
            num_tokens, step_s = _counts(load)[HEAVY]
            tokens_per_s = (num_tokens - before) / (time.monotonic() - start)
    with _streams(arguments, {HEAVY: arguments.num_streams, OTHER: arguments.num_streams}) as load:
        await _until_all_wait(load)
        before_of = _counts(load)
        await asyncio.sleep(arguments.seconds)
        shares = [count - before_of[client][0] for client, (count, _) in _counts(load).items()]
    idle_s, loaded_s = statistics.median(idle), statistics.median(loaded)
    return {
        "first_token_idle_ms": round(1e3 * idle_s, 2),
        "first_token_loaded_ms": round(1e3 * loaded_s, 2),
        "first_token_loaded_p90_ms": round(1e3 * statistics.quantiles(loaded, n=10)[-1], 2),
        "step_ms": round(1e3 * step_s, 2),
        "first_token_ratio": round((loaded_s - step_s) / idle_s, 3),
        "other_tokens_per_s": round(tokens_per_s, 1),
        "jain_index": round(jain_index(shares), 4),
    }


async def _first_tokens_s(stub: gateway_pb2_grpc.GatewayStub, arguments: argparse.Namespace) -> list[float]:
    times = []
    for _ in range(arguments.num_requests):
        times.append(await _first_token_s(stub, arguments.prompt_len))
        await asyncio.sleep(PAUSE_S)
    return times


async def _first_token_s(stub: gateway_pb2_grpc.GatewayStub, prompt_len: int) -> float:
    start = time.monotonic()
    call = stub.GenerateStream(_request(prompt_len, 4), metadata=_metadata(NEWCOMER))
    first_s: float | None = None
    async for chunk in call:
        if first_s is None and chunk.token_ids:
            first_s = time.monotonic() - start
    assert first_s is not None, "an answer has tokens"
    return first_s


def _request(prompt_len: int, max_tokens: int) -> gateway_pb2.GenerateRequest:
    number = time.monotonic_ns()  # so that no prompt is in the prefix cache
    token_ids = [10 + (number >> (4 * i % 60) & 15) * 7 for i in range(prompt_len)]
    return gateway_pb2.GenerateRequest(
        prompt_token_ids=gateway_pb2.TokenIds(ids=token_ids),
        max_tokens=max_tokens,
        ignore_eos=True,
        sampling=sampling_pb2.SamplingParams(temperature=0.0),
    )


def _metadata(client: str) -> tuple[tuple[str, str], ...]:
    return (("x-forwarded-for", client),)


@contextlib.asynccontextmanager
async def _open(address: str) -> AsyncIterator[gateway_pb2_grpc.GatewayStub]:
    async with grpc.aio.insecure_channel(address) as channel:
        await asyncio.wait_for(channel.channel_ready(), CONNECT_TIMEOUT_S)
        yield gateway_pb2_grpc.GatewayStub(channel)


@contextlib.contextmanager
def _streams(arguments: argparse.Namespace, num_streams: dict[str, int]):  # noqa: ANN202  an iterator of a connection
    """Keeps streams of these clients open, in another process, which answers any message with its counts."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_stream_all, args=(arguments, num_streams, theirs), daemon=True)
    process.start()
    try:
        yield ours
    finally:
        process.terminate()
        process.join()


async def _until_all_wait(load: Connection) -> None:
    """Waits until all clients have got tokens."""
    async with asyncio.timeout(START_TIMEOUT_S):
        while not all(count for count, _ in _counts(load).values()):  # noqa: ASYNC110  the other process tells nothing
            await asyncio.sleep(0.1)
    await asyncio.sleep(2.0)  # for the rest of the requests to arrive


def _counts(load: Connection) -> Counts:
    load.send(None)
    return load.recv()


def _stream_all(arguments: argparse.Namespace, num_streams: dict[str, int], connection: Connection) -> None:
    asyncio.run(_Streams(arguments).run(num_streams, connection))


class _Streams:
    """In the process of the streams."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._arguments = arguments
        self._num_tokens: dict[str, int] = {}
        self._gaps: list[float] = []

    async def run(self, num_streams: dict[str, int], connection: Connection) -> None:
        """Runs until the process is ended."""
        self._num_tokens = dict.fromkeys(num_streams, 0)
        loop = asyncio.get_running_loop()
        loop.add_reader(connection.fileno(), self._answer, connection)
        async with _open(self._arguments.address) as stub:
            streams = [self._repeat(stub, client) for client, count in num_streams.items() for _ in range(count)]
            await asyncio.gather(*streams)

    def _answer(self, connection: Connection) -> None:
        connection.recv()
        step_s = statistics.median(self._gaps) if self._gaps else math.nan
        self._gaps.clear()
        connection.send({client: (count, step_s) for client, count in self._num_tokens.items()})

    async def _repeat(self, stub: gateway_pb2_grpc.GatewayStub, client: str) -> None:
        while True:
            request = _request(self._arguments.prompt_len, self._arguments.output_len)
            previous: float | None = None
            async for chunk in stub.GenerateStream(request, metadata=_metadata(client)):
                now = time.monotonic()
                self._num_tokens[client] += len(chunk.token_ids)
                if previous is not None and len(chunk.token_ids) == 1:
                    self._gaps.append(now - previous)
                previous = now


if __name__ == "__main__":
    sys.exit(main())
