"""Measures how long streams pause while the dense worker is replaced: `python bench/replace_dense.py`.

It starts a cluster with the embedded model, keeps streams running, and replaces the worker again and again. Loading a
second worker takes CPU time too, so for comparison it also loads workers that are then refused (other weights), and
none. The result is the longest pause of each stream in each phase.
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
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.support.cluster import REPOSITORY, Cluster, request, running_cluster

QUIET_S = 5.0  # length of the phase without a second worker
MAX_TOKENS = 1500


class Streams:
    """Streams that restart when they end. Records when each stream gets tokens."""

    def __init__(self, cluster: Cluster, num_streams: int) -> None:
        self.token_times_s: list[list[float]] = [[] for _ in range(num_streams)]
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
            stream = self._cluster.gateway.GenerateStream(request("Count from 1", MAX_TOKENS, ignore_eos=True))
            for chunk in stream:
                if chunk.token_ids:
                    times.append(time.monotonic())
                if self._is_over.is_set():
                    stream.cancel()
                    return

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


def measure(cluster: Cluster, num_streams: int, repeats: int) -> dict[str, tuple[list[float], list[float]]]:
    """The longest pauses of all streams by phase, and the pauses that the launcher reports, in milliseconds."""
    phases: dict[str, tuple[list[float], list[float]]] = {}
    actions = {
        "no second worker": lambda: time.sleep(QUIET_S),
        "a second worker loads and is refused": lambda: ctl(cluster, 1, "--set", "model.num_layers=1"),
        "the worker is replaced": lambda: ctl(cluster, 0),
    }
    with Streams(cluster, num_streams) as streams:
        while not all(streams.token_times_s):
            time.sleep(0.01)
        for name, act in actions.items():
            silences, pauses = phases[name] = [], []
            for _ in range(repeats):
                begin_s = time.monotonic()
                result = act()
                silences += streams.longest_silences_ms(begin_s, time.monotonic())
                if result is not None:
                    pauses += [float(each) for each in re.findall(r"no step for (\d+) ms", result.stdout)]
    return phases


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory, running_cluster(Path(directory)) as cluster:
        phases = measure(cluster, arguments.streams, arguments.repeats)
    print("| | longest silence of a stream: median, ms | worst, ms | no step, by the launcher: median, ms |")
    print("|---|---|---|---|")
    for name, (silences, pauses) in phases.items():
        pause = f"{statistics.median(pauses):.0f}" if pauses else ""
        print(f"| {name} | {statistics.median(silences):.0f} | {max(silences):.0f} | {pause} |")


if __name__ == "__main__":
    main()
