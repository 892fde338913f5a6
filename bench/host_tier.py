"""What a host tier below the KV cache gains and costs: one server with it and one without, in turns.

    python bench/host_tier.py                                                      # on this CPU, the embedded model
    python bench/host_tier.py --shape llama-3-8b --chat-tokens 32000 --num-blocks 3000 --host-kv-bytes 17179869184 \
        --prefix-tokens 4000 --set model.max_model_len=36000                       # on a GPU, random weights

chat: the time to the first token of the second turn of a long chat whose blocks were evicted since the first one.
Zipf: requests whose prefixes together are larger than the device's cache; the n-th most common one comes 1/n as often.
writing: the rate of tokens that nobody asks for again, so that the tier only takes copies: of answers and of prompts.

Both servers have the same blocks on the device and get the same prompts.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from random import Random

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.gpu.models import SHAPES, write_model
from tests.support.cluster import Cluster, free_port, request, running_cluster
from tests.support.scrape import Scrape
from tests.support.undisturbed import cpu_s

TOKEN_IDS = range(3, 250)
BLOCK_SIZE = 16
TURN_TOKENS = 32  # of an answer, and of the next question
WARM_UP = 2  # requests before a measurement
TIMEOUT_S = 300.0
QUIET_S = 0.3


@dataclass(frozen=True)
class Server:
    """A cluster, and where its attention worker serves metrics."""

    cluster: Cluster
    metrics_address: str

    def count(self, name: str) -> float:
        """A counter of the attention worker."""
        return Scrape(self.metrics_address).value(f"twostroke_attention_{name}_total")

    def settle(self) -> None:
        """Waits until no more blocks are copied."""
        last = -1.0
        while (num_written := self.count("host_kv_written_blocks")) != last:
            last = num_written
            time.sleep(QUIET_S)

    def first_token_s(self, prompt: Sequence[int]) -> tuple[float, list[int]]:
        """Seconds to the first token of an answer, and all its tokens."""
        message = request(prompt, TURN_TOKENS, ignore_eos=True)
        start, first_s, token_ids = time.perf_counter(), 0.0, list[int]()
        for chunk in self.cluster.gateway.GenerateStream(message, timeout=TIMEOUT_S):
            if chunk.token_ids and not token_ids:
                first_s = time.perf_counter() - start
            token_ids += chunk.token_ids
        assert len(token_ids) == TURN_TOKENS
        return first_s, token_ids

    def time_all(self, prompts: Sequence[Sequence[int]], max_tokens: int, concurrency: int) -> float:
        """Seconds until all prompts have their answers, so many at a time."""

        def run(prompt: Sequence[int]) -> None:
            message = request(prompt, max_tokens, ignore_eos=True)
            answer = self.cluster.gateway.Generate(message, timeout=TIMEOUT_S)
            assert len(answer.completions[0].token_ids) == max_tokens

        start = time.perf_counter()
        with ThreadPoolExecutor(concurrency) as threads:
            list(threads.map(run, prompts))
        return time.perf_counter() - start


def prompt_of(name: str, num_tokens: int) -> list[int]:
    """Random tokens, which are the same for the same name."""
    return Random(name).choices(TOKEN_IDS, k=num_tokens)


def in_turns(servers: dict[str, Server], index: int) -> Iterator[tuple[str, Server]]:
    """The servers in the order of a round: each goes first in every other one."""
    yield from servers.items() if index % 2 else reversed(servers.items())


def measure_chat(servers: dict[str, Server], rounds: int, chat_tokens: int, num_blocks: int) -> None:
    """Prints the times to the first token of a second turn."""
    times: dict[tuple[str, str], list[float]] = {}
    for index in range(-1, rounds):  # the first round warms up
        for name, server in in_turns(servers, index):
            chat = prompt_of(f"chat {index}", chat_tokens)
            first_s, answer = server.first_token_s(chat)
            second = [*chat, *answer, *prompt_of(f"question {index}", TURN_TOKENS)]
            present_s, _ = server.first_token_s(second)
            server.settle()
            num_left, filler = num_blocks * BLOCK_SIZE, 0
            while num_left > 0:
                server.first_token_s(prompt_of(f"other {index} {filler}", min(chat_tokens, num_left) or 1))
                num_left, filler = num_left - chat_tokens, filler + 1
            evicted_s, _ = server.first_token_s([*second[:-1], 3])
            if index >= 0:
                for kind, seconds in (("first", first_s), ("present", present_s), ("evicted", evicted_s)):
                    times.setdefault((name, kind), []).append(seconds)
    print(f"| first token of a turn of {chat_tokens} tokens, ms | without the tier | with it | without / with |")
    print("|---|---|---|---|")
    kinds = {"first": "first turn", "present": "second, blocks on the device", "evicted": "second, blocks evicted"}
    for kind, text in kinds.items():
        off, on = (1e3 * statistics.median(times[name, kind]) for name in servers)
        print(f"| {text} | {off:.1f} | {on:.1f} | {off / on:.2f} |", flush=True)


def measure_zipf(
    servers: dict[str, Server], rounds: int, num_prefixes: int, prefix_tokens: int, num_requests: int, concurrency: int
) -> None:
    """Prints rates, and where the tokens of prompts were found."""
    weights = [1 / rank for rank in range(1, num_prefixes + 1)]
    rates: dict[str, list[float]] = {name: [] for name in servers}
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in servers}
    for index in range(-1, rounds):
        ranks = Random(f"ranks {index}").choices(range(num_prefixes), weights, k=num_requests)
        prompts = [
            [*prompt_of(f"prefix {rank}", prefix_tokens), *prompt_of(f"suffix {index} {number}", TURN_TOKENS)]
            for number, rank in enumerate(ranks)
        ]
        num_tokens = sum(map(len, prompts))
        for name, server in in_turns(servers, index):
            before = server.count("cached_tokens"), server.count("loaded_tokens")
            seconds = server.time_all(prompts, TURN_TOKENS // 4, concurrency)
            cached, loaded = server.count("cached_tokens") - before[0], server.count("loaded_tokens") - before[1]
            if index >= 0:
                rates[name].append(num_requests / seconds)
                found[name].append(((cached - loaded) / num_tokens, loaded / num_tokens))
    print(
        f"| {num_prefixes} prefixes of {prefix_tokens} tokens, Zipf | requests/s | found on the device"
        " | found in the tier |\n|---|---|---|---|"
    )
    for name in servers:
        on_device, in_tier = (statistics.median(each) for each in zip(*found[name], strict=True))
        print(f"| {name} | {statistics.median(rates[name]):.2f} | {on_device:.1%} | {in_tier:.1%} |", flush=True)
    off, on = (statistics.median(rates[name]) for name in servers)
    print(f"| with / without | {on / off:.2f} | | |", flush=True)


def measure_writing(servers: dict[str, Server], rounds: int, chat_tokens: int, concurrency: int) -> None:
    """Prints rates of tokens that nobody asks for again."""
    works: dict[str, tuple[int, int]] = {"answers": (TURN_TOKENS, 8 * TURN_TOKENS), "prompts": (chat_tokens // 2, 4)}
    print(
        f"| {concurrency} streams | tokens/s without the tier | with it | with / without"
        " | CPU ms of the attention worker per 1000 tokens, without | with |\n|---|---|---|---|---|---|"
    )
    for work, (num_prompt, max_tokens) in works.items():
        rates: dict[str, list[float]] = {name: [] for name in servers}
        costs: dict[str, list[float]] = {name: [] for name in servers}
        for index in range(-1, rounds):
            prompts = [prompt_of(f"{work} {index} {number}", num_prompt) for number in range(2 * concurrency)]
            for name, server in in_turns(servers, index):
                pid, num_tokens = server.cluster.pid_of("attn_worker"), len(prompts) * (num_prompt + max_tokens)
                before_s = cpu_s(pid)
                seconds = server.time_all(prompts, max_tokens, concurrency)
                server.settle()
                if index >= 0:
                    rates[name].append(num_tokens / seconds)
                    costs[name].append(1e6 * (cpu_s(pid) - before_s) / num_tokens)
        off, on = (statistics.median(rates[name]) for name in servers)
        ratio = statistics.median(b / a for a, b in zip(*rates.values(), strict=True))
        cpu = " | ".join(f"{statistics.median(costs[name]):.1f}" for name in servers)
        print(f"| {work} | {off:.0f} | {on:.0f} | {ratio:.3f} | {cpu} |", flush=True)


@contextlib.contextmanager
def running(directory: Path, settings: Sequence[str]) -> Iterator[Server]:
    """A server with metrics of its attention worker."""
    directory.mkdir()
    address = f"127.0.0.1:{free_port()}"
    with running_cluster(directory, f"attention.metrics_address={address}", *settings) as cluster:
        yield Server(cluster, address)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, help="random weights of this shape, else model.path")
    parser.add_argument("--chat-tokens", type=int, default=1800)
    parser.add_argument("--num-blocks", type=int, default=160, help=f"of {BLOCK_SIZE} tokens, on the device")
    parser.add_argument("--host-kv-bytes", type=int, default=128 * 2**20)
    parser.add_argument("--prefixes", type=int, default=40)
    parser.add_argument("--prefix-tokens", type=int, default=600)
    parser.add_argument("--requests", type=int, default=100, help="of one round of the Zipf mix")
    parser.add_argument("--concurrency", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5, help="rounds; the median counts")
    parser.add_argument("--parts", nargs="+", choices=("chat", "zipf", "writing"), default=("chat", "zipf", "writing"))
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="a setting of both")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tier-") as name, contextlib.ExitStack() as stack:
        directory = Path(name)
        settings = [f"attention.block_size={BLOCK_SIZE}", f"attention.num_blocks={args.num_blocks}", *args.set]
        if args.shape is not None:
            model = write_model(directory / "model", args.shape, "stored")
            settings += [f"model.path={model}", "model.load_format=dummy"]
        tier = f"attention.host_kv_bytes={args.host_kv_bytes}"
        servers = {
            "without the tier": stack.enter_context(running(directory / "off", settings)),
            "with the tier": stack.enter_context(running(directory / "on", [*settings, tier])),
        }
        if "chat" in args.parts:
            measure_chat(servers, args.rounds, args.chat_tokens, args.num_blocks)
            print()
        if "zipf" in args.parts:
            mix = (args.prefixes, args.prefix_tokens, args.requests, args.concurrency)
            measure_zipf(servers, args.rounds, *mix)
            print()
        if "writing" in args.parts:
            measure_writing(servers, args.rounds, args.chat_tokens, args.concurrency)


if __name__ == "__main__":
    main()
