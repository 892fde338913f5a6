"""Measures how long streams pause while the dense worker is replaced: `python bench/replace_dense.py`.

It starts a cluster with the embedded model, keeps streams running, and replaces the worker again and again. Loading a
second worker takes CPU time too, so for comparison it also loads workers that are then refused (other weights), and
none. The result is the longest pause of each stream in each phase, and the number of requests that failed.

On a GPU, from torch to TensorRT and back, with plans that were built ahead (`dense.build=never` says how):

    python bench/replace_dense.py --set model.path=DIR --set model.dtype=float16 --set dense.backend=torch \\
        --set dense.build=never --change dense.backend=tensorrt --change dense.backend=torch

There the graphs are listed, too, that were captured during each phase because a step needed them.
"""

from __future__ import annotations

import argparse
import itertools
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import grpc

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.support.cluster import REPOSITORY, Cluster, request, running_cluster

QUIET_S = 5.0  # length of the phase without a second worker
AFTER_S = 2.0  # also measured after each action
RETRY_S = 0.1
MAX_TOKENS = 1500
PROMPT = [1, *range(3, 19)]  # any token ids, because a model with random weights may have no tokenizer


class Streams:
    """Streams that restart when they end. Records when each stream gets tokens."""

    def __init__(self, cluster: Cluster, num_streams: int) -> None:
        self.token_times_s: list[list[float]] = [[] for _ in range(num_streams)]
        self.errors: list[str] = []  # of requests that failed
        self._cluster = cluster
        self._is_over = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(times,)) for times in self.token_times_s]

    def __enter__(self) -> Streams:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join()

    def _run(self, times: list[float]) -> None:
        while not self._is_over.is_set():
            stream = self._cluster.gateway.GenerateStream(request(PROMPT, MAX_TOKENS, ignore_eos=True))
            try:
                for chunk in stream:
                    if chunk.token_ids:
                        times.append(time.monotonic())
                    if self._is_over.is_set():
                        stream.cancel()
                        return
            except grpc.RpcError as error:
                self.errors.append(f"{error.code().name}: {error.details()}")
                time.sleep(RETRY_S)

    def longest_silences_ms(self, begin_s: float, end_s: float) -> list[float]:
        """The longest pause of each stream between two times on the monotonic clock."""
        return [longest_silence_ms(times, begin_s, end_s) for times in self.token_times_s]


def longest_silence_ms(times_s: Sequence[float], begin_s: float, end_s: float) -> float:
    """The longest time without a token within the period, in milliseconds."""
    within = [begin_s, *(each for each in times_s if begin_s <= each <= end_s), end_s]
    return 1e3 * max(after - before for before, after in itertools.pairwise(within))


def ctl(cluster: Cluster, status: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Calls `ctl` of this cluster's launcher (others may run here). It must end with this status."""
    address = re.findall(r"event=control address=(\S+)", cluster.log_file.read_text())[0]
    command = [sys.executable, "-m", "services.launch", "ctl", "--launcher", address, "replace-dense", *arguments]
    result = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert result.returncode == status, result.stderr
    return result


@dataclass
class Phase:
    """What was measured while something was done repeatedly."""

    silences_ms: list[float] = field(default_factory=list)  # the longest one of each stream, each time
    pauses_ms: list[float] = field(default_factory=list)  # that the launcher reports
    captures_s: list[float] = field(default_factory=list)  # of graphs, because a step needed them
    errors: list[str] = field(default_factory=list)  # of requests that failed


def measure(cluster: Cluster, num_streams: int, repeats: int, changes: Sequence[str]) -> dict[str, Phase]:
    """The phases by name; `changes` are made in turn, each by a replacement."""
    actions = {
        "no second worker": lambda: time.sleep(QUIET_S),
        "a second worker loads and is refused": lambda: ctl(cluster, 1, "--set", "model.num_layers=1"),
    }
    for change in changes:
        setting = ("--set", change) if change else ()
        actions[f"the worker is replaced {change}".strip()] = partial(ctl, cluster, 0, *setting)
    phases = {name: Phase() for name in actions}
    with Streams(cluster, num_streams) as streams:
        while not all(streams.token_times_s):
            assert not streams.errors, f"a request failed before anything was replaced: {streams.errors[0]}"
            time.sleep(0.01)
        for _ in range(repeats):
            for name, act in actions.items():
                phase, begin_s = phases[name], time.monotonic()
                num_errors, log_bytes = len(streams.errors), cluster.log_file.stat().st_size
                result = act()
                time.sleep(AFTER_S)  # in which steps need graphs
                phase.silences_ms += streams.longest_silences_ms(begin_s, time.monotonic())
                phase.errors += streams.errors[num_errors:]
                log = cluster.log_file.read_text()[log_bytes:]
                phase.captures_s += map(float, re.findall(r'"captured a graph".* seconds=(\S+)', log))
                if result is not None:
                    phase.pauses_ms += map(float, re.findall(r"no step for (\d+) ms", result.stdout))
    return phases


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="of the cluster's config")
    parser.add_argument("--change", action="append", default=[], metavar="KEY=VALUE", help="by a replacement, in turn")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory, running_cluster(Path(directory), *arguments.set) as cluster:
        phases = measure(cluster, arguments.streams, arguments.repeats, arguments.change or [""])
    print(
        "| | longest silence of a stream: median, ms | worst, ms | no step, by the launcher: median, ms | worst, ms "
        "| failed requests | graphs captured for a step: number, longest ms |"
    )
    print("|---|---|---|---|---|---|---|")
    for name, phase in phases.items():
        silences, pauses, captures = phase.silences_ms, phase.pauses_ms, phase.captures_s
        cells = [name, f"{statistics.median(silences):.0f}", f"{max(silences):.0f}"]
        cells += [f"{statistics.median(pauses):.0f}", f"{max(pauses):.0f}"] if pauses else ["", ""]
        cells += [str(len(phase.errors)), f"{len(captures)}, {1e3 * max(captures):.0f}" if captures else ""]
        print(f"| {' | '.join(cells)} |")
    errors = [error for phase in phases.values() for error in phase.errors]
    for error in errors[:3]:
        print(f"a request failed: {error}", file=sys.stderr)
    return int(bool(errors))


if __name__ == "__main__":
    sys.exit(main())
