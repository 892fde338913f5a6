"""What beam search costs: searches with k beams against k greedy streams of the same prompts, on one server in turns.

    python bench/options/beams.py                                               # on this CPU, with the embedded model
    python bench/options/beams.py --shape llama-2-7b --set dense.backend=torch  # on a GPU, with random weights

The first table has one search, or k greedy answers, on an idle server. The second one has the same beside other greedy
streams: how long these take for a token. No search ends early, so each has the same number of steps.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import grpc

from bench.gpu.models import SHAPES, write_model
from services.pb import gateway_pb2, gateway_pb2_grpc
from tests.support.cluster import running_cluster

WIDTHS = (2, 4, 8)
PROMPT_TOKENS = 128
TOKEN_IDS = range(3, 250)
TIMEOUT_S = 120.0
CHANNEL_OPTIONS = [("grpc.use_local_subchannel_pool", 1)]


def make_request(name: str, num_answers: int, max_tokens: int, *, is_search: bool) -> gateway_pb2.GenerateRequest:
    """`num_answers` greedy answers to one prompt, or a search with so many beams. A name stands for one prompt."""
    prompt = random.Random(name).choices(TOKEN_IDS, k=PROMPT_TOKENS)
    request = gateway_pb2.GenerateRequest(n=num_answers, max_tokens=max_tokens, ignore_eos=True)
    request.prompt_token_ids.ids.extend(prompt)
    request.sampling.temperature = 0.0
    if is_search:
        request.beam_search.SetInParent()
    return request


class Client:
    """Sends requests to one gateway."""

    def __init__(self, address: str) -> None:
        self._channel = grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
        self._gateway = gateway_pb2_grpc.GatewayStub(self._channel)

    async def time_answer(self, request: gateway_pb2.GenerateRequest) -> float:
        """Seconds until all answers are there."""
        start = time.perf_counter()
        response = await self._gateway.Generate(request, timeout=TIMEOUT_S)
        seconds = time.perf_counter() - start
        lengths = {len(completion.token_ids) for completion in response.completions}
        assert len(response.completions) == request.n and lengths == {request.max_tokens}, lengths
        return seconds

    async def time_streams(self, requests: Sequence[gateway_pb2.GenerateRequest]) -> float:
        """The median over streams of their milliseconds per token."""

        async def stream(request: gateway_pb2.GenerateRequest) -> float:
            async for chunk in self._gateway.GenerateStream(request, timeout=TIMEOUT_S):
                if chunk.HasField("finish"):
                    return chunk.finish.timings.per_token_ms
            raise AssertionError("a stream had no end")

        return statistics.median(await asyncio.gather(*map(stream, requests)))

    async def close(self) -> None:
        await self._channel.close()


async def measure_alone(client: Client, rounds: int, max_tokens: int) -> None:
    """Prints the first table."""
    times: dict[tuple[int, bool], list[float]] = {}
    for index in range(-1, rounds):  # the first round warms up
        for width in WIDTHS:
            for is_search in (False, True):
                request = make_request(f"alone {index} {width}", width, max_tokens, is_search=is_search)
                seconds = await client.time_answer(request)
                if index >= 0:
                    times.setdefault((width, is_search), []).append(seconds)
    print("| beams | k greedy answers, ms per step | search, ms per step | search / greedy |\n|---|---|---|---|")
    for width in WIDTHS:
        greedy, search = (1e3 * statistics.median(times[width, each]) / max_tokens for each in (False, True))
        print(f"| {width} | {greedy:.3f} | {search:.3f} | {search / greedy:.3f} |", flush=True)


async def measure_beside(client: Client, rounds: int, max_tokens: int, num_streams: int) -> None:
    """Prints the second table."""
    width = WIDTHS[-1]
    kinds = {"nothing": None, f"{width} greedy answers": False, f"a search with {width} beams": True}
    others: dict[str, list[float]] = {kind: [] for kind in kinds}
    own: dict[str, list[float]] = {kind: [] for kind in kinds}
    for index in range(-1, rounds):
        for kind, is_search in kinds.items():
            names = [f"beside {index} {stream}" for stream in range(num_streams)]
            streams = client.time_streams([make_request(each, 1, max_tokens, is_search=False) for each in names])
            if is_search is None:
                per_token_ms, seconds = await streams, 0.0
            else:
                request = make_request(f"beside {index}", width, max_tokens, is_search=is_search)
                per_token_ms, seconds = await asyncio.gather(streams, client.time_answer(request))
            if index >= 0:
                others[kind].append(per_token_ms)
                own[kind].append(1e3 * seconds / max_tokens)
    print(f"| beside {num_streams} streams | their ms per token | to nothing | its own ms per token |")
    print("|---|---|---|---|")
    alone = statistics.median(others["nothing"])
    for kind in kinds:
        median, of_own = statistics.median(others[kind]), statistics.median(own[kind])
        print(f"| {kind} | {median:.3f} | {median / alone:.3f} | {f'{of_own:.3f}' if of_own else '–'} |")


async def measure(address: str, args: argparse.Namespace) -> None:
    client = Client(address)
    try:
        await measure_alone(client, args.rounds, args.max_tokens)
        print()
        await measure_beside(client, args.rounds, args.max_tokens, args.streams)
    finally:
        await client.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, help="random weights of this shape, else model.path")
    parser.add_argument("--streams", type=int, default=16, help="of the second table")
    parser.add_argument("--rounds", type=int, default=5, help="rounds; the median counts")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="a server's setting")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="beams-") as name:
        directory, settings = Path(name), args.set
        if args.shape is not None:
            model = write_model(directory / "model", args.shape, "stored")
            settings = [f"model.path={model}", "model.load_format=dummy", *settings]
        with running_cluster(directory, *settings) as cluster:
            asyncio.run(measure(cluster.address, args))


if __name__ == "__main__":
    main()
