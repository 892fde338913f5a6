"""What a burst of long prompts does to running streams, and what an attention worker that is added then changes.

    python bench/elastic.py                                                        # on CPUs, with the embedded model
    python bench/elastic.py --shape llama-2-7b --long-prompt-len 3000              # on a GPU, with random weights

Short streams run all the time. Then clients with long prompts come, and go on asking. In the middle of that one more
attention worker is started; it gets the sequences that come next. The figures are the times between two tokens of the
short streams in each phase, and the tokens per second of all clients.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import grpc

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.gpu.models import SHAPES, write_model
from bench.load.own_server import write_vocabulary
from tests.support.cluster import Cluster, ctl, request, running_cluster

VOCABULARY = 1000  # token ids of prompts; every model has more
SETTLE_S = 2.0  # after each change, before it is measured


class Clients:
    """Streams of random prompts, each followed by the next one at once. Records when tokens come."""

    def __init__(self, cluster: Cluster, number: int, prompt_len: int, output_len: int) -> None:
        self.times_s: list[list[float]] = [[] for _ in range(number)]
        self.first_s: list[tuple[float, float]] = []  # of each request: when it was sent, and its first token
        self.errors: list[str] = []
        self._cluster, self._prompt_len, self._output_len = cluster, prompt_len, output_len
        self._is_over = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(index,)) for index in range(number)]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join()

    def _run(self, index: int) -> None:
        for number in itertools.count():
            if self._is_over.is_set():
                return
            seed = 7919 * (1 + index + number * len(self.times_s)) + self._prompt_len
            prompt = [1, *(3 + (seed * (each + 1)) % VOCABULARY for each in range(self._prompt_len - 1))]
            sent_s, is_first = time.monotonic(), True
            stream = self._cluster.gateway.GenerateStream(request(prompt, self._output_len, ignore_eos=True))
            try:
                for chunk in stream:
                    if chunk.token_ids:
                        now_s = time.monotonic()
                        if is_first:
                            self.times_s[index].append(float("nan"))  # no time between tokens of two requests
                            self.first_s.append((sent_s, now_s))
                            is_first = False
                        self.times_s[index].append(now_s)
                    if self._is_over.is_set():
                        stream.cancel()
                        return
            except grpc.RpcError as error:
                self.errors.append(f"{error.code().name}: {error.details()}")
                time.sleep(0.1)

    def gaps_ms(self, begin_s: float, end_s: float) -> list[float]:
        """The times between two tokens of a stream that came in this period."""
        pairs = (pair for times in self.times_s for pair in itertools.pairwise(list(times)))
        return [1e3 * (after - before) for before, after in pairs if begin_s <= before and after <= end_s]


def describe(short: Clients, long: Clients | None, begin_s: float, end_s: float) -> dict[str, object]:
    """The figures of one phase."""
    gaps, seconds = sorted(short.gaps_ms(begin_s, end_s)), end_s - begin_s
    long_gaps = [] if long is None else sorted(long.gaps_ms(begin_s, end_s))
    return {
        "short_tpot_ms": {"p50": statistics.median(gaps), "p99": quantile(gaps, 0.99), "max": gaps[-1]},
        "long_tpot_ms": {"p50": statistics.median(long_gaps), "p99": quantile(long_gaps, 0.99)} if long_gaps else None,
        "tokens_per_s": (len(gaps) + len(long_gaps)) / seconds,
    }


def quantile(ascending: Sequence[float], part: float) -> float:
    return ascending[min(len(ascending) - 1, int(part * len(ascending)))]


def measure(cluster: Cluster, arguments: argparse.Namespace) -> dict[str, dict[str, object]]:
    """The phases, in order."""
    phases = dict[str, dict[str, object]]()
    short = Clients(cluster, arguments.short, arguments.short_prompt_len, arguments.output_len)
    long = Clients(cluster, arguments.long, arguments.long_prompt_len, arguments.output_len)

    def note(name: str, begin_s: float, others: Clients | None) -> None:
        phases[name] = describe(short, others, begin_s, time.monotonic())
        status = cluster.dense_status().attention_workers
        phases[name]["sequences_of_workers"] = [each.num_sequences for each in status]
        print(json.dumps({name: phases[name]}), flush=True)

    try:
        short.start()
        time.sleep(SETTLE_S)
        begin_s = time.monotonic()
        time.sleep(arguments.seconds)
        note("before the burst", begin_s, None)
        begin_s = time.monotonic()
        long.start()
        time.sleep(arguments.seconds)
        note("burst, one worker", begin_s, long)
        begin_s = time.monotonic()
        added: subprocess.CompletedProcess[str] = ctl(cluster, "add-attention")
        assert added.returncode == 0, added.stderr
        added_s = time.monotonic() - begin_s
        note("while one is added", begin_s, long)
        phases["while one is added"]["seconds"] = added_s
        time.sleep(arguments.spread_seconds)  # sequences that come now go to the new worker
        begin_s = time.monotonic()
        time.sleep(arguments.seconds)
        note("burst, two workers", begin_s, long)
    finally:
        long.stop()
        short.stop()
    errors = [*short.errors, *long.errors]
    assert not errors, errors[:3]
    return phases


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", type=int, default=4, help="clients with short prompts")
    parser.add_argument("--long", type=int, default=4, help="clients with long prompts")
    parser.add_argument("--short-prompt-len", type=int, default=16)
    parser.add_argument("--long-prompt-len", type=int, default=1500)
    parser.add_argument("--output-len", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=15.0, help="of each phase")
    parser.add_argument("--spread-seconds", type=float, default=10.0, help="before the last phase")
    parser.add_argument("--shape", choices=SHAPES, help="a model of this shape with random weights")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="of the cluster's config")
    arguments = parser.parse_args()
    settings = ("attention.elastic=true", *arguments.set)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory)
        if arguments.shape is not None:
            model = write_model(path / "model", arguments.shape, "stored")
            write_vocabulary(model)
            settings = (f"model.path={model}", "model.load_format=dummy", *settings)
        with running_cluster(path, *settings) as cluster:
            phases = measure(cluster, arguments)
    print("| phase | TPOT of short streams: P50, ms | P99, ms | worst, ms | tokens/s | sequences of workers |")
    print("|---|---|---|---|---|---|")
    for name, each in phases.items():
        tpot = each["short_tpot_ms"]
        assert isinstance(tpot, dict)
        cells = [f"{tpot[key]:.1f}" for key in ("p50", "p99", "max")]
        print(f"| {name} | {' | '.join(cells)} | {each['tokens_per_s']:.0f} | {each['sequences_of_workers']} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
