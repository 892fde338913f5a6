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
import itertools
import os
import signal
import statistics
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
from tests.support.rank_processes import pid_of

VOCABULARY = 1000
OUTPUT_LEN = 500  # of a stream, which is cancelled before that
TOKENS_BEFORE = 20  # of a stream, before its worker is drained


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

    prompt = [1, *(3 + (seed * (each + 1)) % VOCABULARY for each in range(prompt_len - 1))]
    blocker = cluster.gateway.GenerateStream(request(prompt[::-1], OUTPUT_LEN, ignore_eos=True))
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
    return max(after - before for before, after in itertools.pairwise(times_s[TOKENS_BEFORE - 1 :]))


def pause_of_other_s(cluster: Cluster, prompt_len: int, seed: int) -> tuple[float, float]:
    """Seconds between two tokens of a stream: the longest time from the death of the other stream's worker on, until
    that one goes on, and the median before.
    """
    while len(cluster.dense_status().attention_workers) < 2:  # the one that was killed last comes back
        time.sleep(0.1)
    prompt = [1, *(3 + (seed * (each + 1)) % VOCABULARY for each in range(prompt_len - 1))]
    other = cluster.gateway.GenerateStream(request(prompt[::-1], OUTPUT_LEN, ignore_eos=True))
    next(iter(other))
    first, *_ = cluster.dense_status().attention_workers
    stream = cluster.gateway.GenerateStream(request(prompt, OUTPUT_LEN, ignore_eos=True))
    times_s, is_killed, goes_on = list[float](), threading.Event(), threading.Event()

    def follow() -> None:
        with contextlib.suppress(grpc.RpcError):  # it is cancelled at the end
            for _ in other:
                if is_killed.is_set():
                    goes_on.set()

    following = threading.Thread(target=follow)
    following.start()
    for chunk in stream:
        times_s += [time.monotonic()] * bool(chunk.token_ids)
        if len(times_s) == TOKENS_BEFORE:
            os.kill(pid_of(cluster, "attn_worker" if first.num_sequences else "attn_worker-1"), signal.SIGKILL)
            is_killed.set()
        if goes_on.is_set():
            break
    assert goes_on.is_set(), "the stream has ended before the other one went on: take shorter prompts"
    stream.cancel()
    other.cancel()
    following.join()
    cluster.wait_idle()
    gaps_s = [after - before for before, after in itertools.pairwise(times_s)]
    return max(gaps_s[TOKENS_BEFORE - 1 :]), statistics.median(gaps_s[: TOKENS_BEFORE - 1])


def print_pauses_of_others(settings: Sequence[str], lengths: Sequence[int], repeats: int) -> None:
    """A line for each length: the medians."""
    print("| tokens of the prompt | longest time between two tokens, ms | median before, ms |\n|---|---|---|")
    with tempfile.TemporaryDirectory() as directory:
        own = ["attention.workers=2", "launch.max_restarts=1000", "launch.restart_window_s=1", *settings]
        with running_cluster(Path(directory), *own) as cluster:
            for length in lengths:
                pauses = [pause_of_other_s(cluster, length, 7919 * (each + 1) + length) for each in range(repeats)]
                longest, usual = (1000 * statistics.median(each) for each in zip(*pauses, strict=True))
                print(f"| {length} | {longest:.0f} | {usual:.1f} |", flush=True)


def measure(cluster: Cluster, lengths: Sequence[int], repeats: int) -> dict[int, float]:
    """The median pause by length, in ms."""
    pauses_s = {
        length: [pause_s(cluster, length, 7919 * (each + 1) + length) for each in range(repeats)] for length in lengths
    }
    return {length: 1000 * statistics.median(each) for length, each in pauses_s.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompt-lens", type=int, nargs="+", default=[64, 256, 1000, 4000])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--shape", choices=SHAPES, help="a model of this shape with random weights")
    parser.add_argument("--model", type=Path, help="another checkpoint")
    parser.add_argument("--kill", action="store_true", help="a worker, beside a stream on another one")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="of the cluster's config")
    arguments = parser.parse_args()
    if arguments.kill:
        model = [] if arguments.model is None else [f"model.path={arguments.model}"]
        print_pauses_of_others([*model, *arguments.set], arguments.prompt_lens, arguments.repeats)
        return 0
    rows = {}
    for name, prefix_cache in (("copied", "true"), ("computed again", "false")):
        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory)
            settings = ["attention.elastic=true", f"attention.enable_prefix_cache={prefix_cache}", *arguments.set]
            if arguments.shape is not None:
                model = write_model(path / "model", arguments.shape, "stored")
                write_vocabulary(model)
                settings += [f"model.path={model}", "model.load_format=dummy"]
            if arguments.model is not None:
                settings.append(f"model.path={arguments.model}")
            with running_cluster(path, *settings) as cluster:
                rows[name] = measure(cluster, arguments.prompt_lens, arguments.repeats)
    print("| tokens of the prompt |", " | ".join(f"{each} ms" for each in rows), "|")
    print("|---|" + "---|" * len(rows))
    for length in arguments.prompt_lens:
        print(f"| {length} |", " | ".join(f"{row[length]:.0f}" for row in rows.values()), "|")
    return 0


if __name__ == "__main__":
    sys.exit(main())
