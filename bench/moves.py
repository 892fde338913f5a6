"""How long a stream stands still while its attention worker is drained: its blocks copied, or computed again.

    python bench/moves.py                                              # on CPUs, with the embedded model
    python bench/moves.py --shape llama-2-7b --set dense.device=cuda   # with random weights
    python bench/moves.py --kill                                       # how long others stand still when a worker dies

A stream with a long prompt runs on a worker that is then drained. The figure is the longest time between two of its
tokens. Computing again is what a server without a prefix cache does. With `--kill` a stream runs on each of two
workers, of which one dies: the figures are of the stream on the other one.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import itertools
import math
import os
import random
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import grpc

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.gpu.models import SHAPES, write_model
from bench.load.own_server import write_vocabulary
from tests.support.cluster import Cluster, ctl, request, running_cluster
from tests.support.rank_processes import pid_of

VOCABULARY = 1000
OTHER_SEED = 1_000_000
OUTPUT_LEN = 500  # of a stream, which is cancelled before that
TOKENS_BEFORE = 20  # of a stream, before its worker is drained
TOKENS_AFTER = 5  # of a stream whose worker has died: some may have been under way


def random_prompt(length: int, seed: int) -> list[int]:
    """One that shares no prefix with those of other seeds, but for the first token."""
    generator = random.Random(seed)
    return [1, *(3 + generator.randrange(VOCABULARY) for _ in range(length - 1))]


def pause_s(cluster: Cluster, prompt_len: int, seed: int) -> float:
    """The longest time between two tokens of a stream, from the beginning of the drain until it goes on elsewhere."""
    added = ctl(cluster, "add-attention")
    assert added.returncode == 0, added.stderr
    name = added.stdout.split()[1].rstrip(",")
    used = {each.address: each.num_sequences for each in cluster.dense_status().attention_workers}
    assert not any(used.values()), used
    times_s, drained = list[float](), threading.Event()

    def drain() -> None:
        result = ctl(cluster, "drain-attention", name)
        assert result.returncode == 0, result.stderr
        drained.set()

    prompt = random_prompt(prompt_len, seed)
    others = random_prompt(prompt_len, OTHER_SEED + seed)
    blocker = cluster.gateway.GenerateStream(request(others, OUTPUT_LEN, ignore_eos=True))
    next(iter(blocker))  # takes room from the first worker, so that the next stream goes to the other one
    stream = cluster.gateway.GenerateStream(request(prompt, OUTPUT_LEN, ignore_eos=True))
    thread = threading.Thread(target=drain)
    for chunk in stream:
        times_s += [time.monotonic()] * bool(chunk.token_ids)
        if len(times_s) == TOKENS_BEFORE:
            [*_, last] = cluster.dense_status().attention_workers
            assert last.num_sequences == 1, f"it is not where it should be: {cluster.dense_status().attention_workers}"
            blocker.cancel()
            thread.start()
        if drained.is_set():
            stream.cancel()
            break
    thread.join()
    cluster.wait_idle()
    longest_s = max(after - before for before, after in itertools.pairwise(times_s[TOKENS_BEFORE - 1 :]))
    print(f"{prompt_len} tokens: {1000 * longest_s:.0f} ms", file=sys.stderr, flush=True)
    return longest_s


class Pauses(NamedTuple):
    """Times between two tokens of a stream beside which another one's worker dies, in seconds."""

    usual: float  # the median before
    at_death: float  # from the last token before to the first one after it
    after: float  # the longest from then on, until the other stream has gone on for a few tokens


def pauses_of_other(cluster: Cluster, prompt_len: int, seed: int) -> Pauses:
    """Kills the worker of a stream, beside a stream on another worker, whose pauses are measured."""
    while len(cluster.dense_status().attention_workers) < 2:  # the one that was killed last comes back
        time.sleep(0.1)
    prompt = random_prompt(prompt_len, seed)
    others = random_prompt(prompt_len, OTHER_SEED + seed)
    other = cluster.gateway.GenerateStream(request(others, OUTPUT_LEN, ignore_eos=True))
    next(iter(other))
    [address] = [each.address for each in cluster.dense_status().attention_workers if each.num_sequences]
    stream = cluster.gateway.GenerateStream(request(prompt, OUTPUT_LEN, ignore_eos=True))
    times_s, other_s = list[float](), list[float]()
    is_killed, goes_on = threading.Event(), threading.Event()

    def follow() -> None:
        with contextlib.suppress(grpc.RpcError):  # it is cancelled at the end
            for _ in other:
                if is_killed.is_set():
                    other_s.append(time.monotonic())
                if len(other_s) == TOKENS_AFTER:
                    goes_on.set()

    following = threading.Thread(target=follow)
    following.start()
    pid, killed_s = 0, math.inf
    for chunk in stream:
        times_s += [time.monotonic()] * bool(chunk.token_ids)
        if len(times_s) == TOKENS_BEFORE // 2:  # what takes long does not come before the kill at once
            assert {each.num_sequences for each in cluster.dense_status().attention_workers} == {1}, "one on each"
            pid = pid_of(cluster, Path(address).stem.replace("attention", "attn_worker"))
        if len(times_s) == TOKENS_BEFORE:
            killed_s = time.monotonic()
            os.kill(pid, signal.SIGKILL)
            print(f"killed {pid} at {datetime.datetime.now(datetime.UTC).isoformat()}", file=sys.stderr, flush=True)
            is_killed.set()
        if goes_on.is_set():
            break
    assert goes_on.is_set(), "the stream has ended before the other one went on: take shorter prompts"
    stream.cancel()
    other.cancel()
    following.join()
    cluster.wait_idle()
    gaps_s = [after - before for before, after in itertools.pairwise(times_s)]
    first = next(index for index, at_s in enumerate(times_s) if at_s > killed_s)  # it may be one that was under way
    at_death = max(gaps_s[first - 1 : first + 1])
    return Pauses(statistics.median(gaps_s[: TOKENS_BEFORE - 1]), at_death, max(gaps_s[first + 1 :]))


def print_pauses_of_others(settings: Sequence[str], lengths: Sequence[int], repeats: int) -> None:
    """A line for each length: the medians."""
    print("| tokens of the prompt | median before, ms | at the death, ms | longest after that, ms |\n|---|---|---|---|")
    with tempfile.TemporaryDirectory() as directory:
        own = ["attention.workers=2", "launch.max_restarts=1000", "launch.restart_window_s=1", *settings]
        with running_cluster(Path(directory), *own) as cluster:
            for length in lengths:
                pauses = [pauses_of_other(cluster, length, 7919 * (each + 1) + length) for each in range(repeats)]
                medians = [1000 * statistics.median(each) for each in zip(*pauses, strict=True)]
                print(f"| {length} | {medians[0]:.1f} | {medians[1]:.0f} | {medians[2]:.0f} |", flush=True)


def measure(cluster: Cluster, lengths: Sequence[int], repeats: int) -> dict[int, float]:
    """The median pause by length, in ms."""
    pauses_s = {
        length: [pause_s(cluster, length, 7919 * (each + 1) + length) for each in range(repeats)] for length in lengths
    }
    return {length: 1000 * statistics.median(each) for length, each in pauses_s.items()}


def print_pauses_of_moves(settings: Sequence[str], lengths: Sequence[int], repeats: int) -> None:
    """A line for each length: the medians, with blocks copied and computed again."""
    rows = {}
    for name, prefix_cache in (("copied", "true"), ("computed again", "false")):
        own = ["attention.elastic=true", f"attention.enable_prefix_cache={prefix_cache}", *settings]
        with tempfile.TemporaryDirectory() as directory, running_cluster(Path(directory), *own) as cluster:
            rows[name] = measure(cluster, lengths, repeats)
    print("| tokens of the prompt |", " | ".join(f"{each} ms" for each in rows), "|")
    print("|---|" + "---|" * len(rows))
    for length in lengths:
        print(f"| {length} |", " | ".join(f"{row[length]:.0f}" for row in rows.values()), "|")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompt-lens", type=int, nargs="+", default=[64, 256, 1000, 4000])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--shape", choices=SHAPES, help="a model of this shape with random weights")
    parser.add_argument("--model", type=Path, help="another checkpoint")
    parser.add_argument("--kill", action="store_true", help="a worker, beside a stream on another one")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="of the cluster's config")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        settings = list(arguments.set)
        if arguments.shape is not None:
            model = write_model(Path(directory) / "model", arguments.shape, "stored")
            write_vocabulary(model)
            settings += [f"model.path={model}", "model.load_format=dummy"]
        if arguments.model is not None:
            settings.append(f"model.path={arguments.model}")
        if arguments.kill:
            print_pauses_of_others(settings, arguments.prompt_lens, arguments.repeats)
        else:
            print_pauses_of_moves(settings, arguments.prompt_lens, arguments.repeats)
    return 0


if __name__ == "__main__":
    sys.exit(main())
