"""Measures how long streams pause when workers die: `python bench/recovery.py`.

It starts a cluster, keeps streams running, and kills workers: the dense one, the attention one, both at once, and the
dense one that was stopped (SIGSTOP), where the pause counts from the moment when the launcher notices it. Before a
kill the standbys of its workers are ready. All of it runs with standbys and without, in turn. The result is the longest
pause in any stream of each kill by percentile, and for one kill of each kind what happened when. The tokens of every
answer are compared with those of the same request without kills.

`--busy` starts processes that compete for the CPU. On a GPU, with a shape like those of the other benches:

    python bench/recovery.py --busy 0 --streams 64 --set model.path=DIR --set model.load_format=dummy

With two ranks, whose second one has a dense shard and an attention worker of its own:

    python bench/recovery.py --set dense.tensor_parallel_size=2 --kinds dense shard attention second-attention
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import itertools
import json
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path

import grpc

sys.path.insert(0, str(Path(__file__).parents[1]))

from services.pb import dense_pb2, launch_pb2, launch_pb2_grpc
from tests.support.cluster import Cluster, request, running_cluster

DENSE, ATTENTION = "dense_worker", "attn_worker"
KINDS = {"dense": [DENSE], "attention": [ATTENTION], "both": [DENSE, ATTENTION], "stopped": [DENSE]}
KINDS_OF_RANKS = {"shard": [f"{DENSE}-1"], "second-attention": [f"{ATTENTION}-1"]}
ALL_KINDS = KINDS | KINDS_OF_RANKS
READY_TIMEOUT_S = 300.0
RECOVERY_TIMEOUT_S = 120.0
NUM_TOKENS_AFTER = 10  # of every stream, after which a kill is over
SETTLED_S = 1.0  # before a kill, with all streams running
STALL_TIMEOUT_S = 3.0  # of the watchdog, if a worker is stopped: the time to notice it is not what is measured
POLL_S = 0.02
MODES = {
    "on": ("launch.standby_dense=auto", "launch.standby_attention=auto"),
    "off": ("launch.standby_dense=off", "launch.standby_attention=off"),
}
MIB = 2**20
BUSY = "while True: pass"
# What the logs say about each phase, by service.
PHASES = {
    "noticed by the launcher": ("launch", r'"the standby takes over"|event=restarting'),
    "attached": ("dense_worker", "event=attached"),
    "dense worker serves": ("dense_worker", "event=serving"),
    "gateway back": ("gateway", '"dense worker connected"'),
}


class Streams:
    """Greedy streams that restart when they end: when each one got tokens, and how many answers were wrong."""

    def __init__(self, cluster: Cluster, num_streams: int, num_prompt_tokens: int, max_tokens: int) -> None:
        self._cluster = cluster
        prompts = [[1, *(3 + (7 * k + i) % 200 for i in range(1, num_prompt_tokens))] for k in range(num_streams)]
        self._requests = [request(prompt, max_tokens, ignore_eos=True) for prompt in prompts]
        self.token_times_s: list[list[float]] = [[] for _ in self._requests]
        self.errors: list[str] = []  # of requests that failed
        self.num_answers, self.num_wrong = 0, 0
        self._expected: list[list[int]] = []
        self._is_over = threading.Event()
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> Streams:
        """Gets every answer without kills, then starts the streams."""
        answers: list[list[int]] = [[] for _ in self._requests]
        with ThreadPoolExecutor(len(answers)) as threads:
            list(threads.map(self._get, range(len(answers)), answers))
        assert not self.errors, f"a request failed before anything was killed: {self.errors[0]}"
        self._expected = answers
        self._threads = [threading.Thread(target=self._run, args=(i,)) for i in range(len(answers))]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join()

    def _run(self, index: int) -> None:
        while not self._is_over.is_set():
            token_ids: list[int] = []
            if not self._get(index, token_ids):
                continue
            with self._lock:
                self.num_answers += 1
                self.num_wrong += token_ids != self._expected[index]

    def _get(self, index: int, token_ids: list[int]) -> bool:
        """Appends the tokens of an answer; returns whether it is complete."""
        stream = self._cluster.gateway.GenerateStream(self._requests[index])
        try:
            for chunk in stream:
                if chunk.token_ids:
                    self.token_times_s[index].append(time.time())
                    token_ids += chunk.token_ids
                if self._is_over.is_set():
                    stream.cancel()
                    return False
        except grpc.RpcError as error:
            self.errors.append(f"{error.code().name}: {error.details()}")
            time.sleep(POLL_S)
            return False
        return True

    def have_tokens_since(self, begin_s: float, count: int) -> bool:
        """Whether every stream has got so many tokens since then."""
        return all(len(times) >= count and times[-count] > begin_s for times in self.token_times_s)

    def longest_gap(self, begin_s: float) -> float:
        """The longest pause in any stream that ended after `begin_s`, in seconds."""
        return max(
            after - before
            for times in self.token_times_s
            for before, after in itertools.pairwise(times)
            if after > begin_s
        )


@dataclass
class Kind:
    """What was measured of one kind of kill."""

    gaps_s: list[float] = field(default_factory=list)  # the longest in any stream, of each kill
    timelines: list[dict[str, float]] = field(default_factory=list)  # seconds after the kill, of each phase


def launcher(cluster: Cluster) -> launch_pb2_grpc.LauncherStub:
    [address] = re.findall(r"event=control address=(\S+)", cluster.log_file.read_text())
    return launch_pb2_grpc.LauncherStub(grpc.insecure_channel(address))


def wait_ready(
    cluster: Cluster, control: launch_pb2_grpc.LauncherStub, names: Sequence[str] | None = None
) -> launch_pb2.LauncherStatus:
    """Waits until the dense worker serves, and the standbys of these workers, or of all, are ready if they are wanted.
    """
    deadline = time.monotonic() + READY_TIMEOUT_S
    while True:
        status = control.GetStatus(launch_pb2.GetStatusRequest())
        standbys = [each for each in status.standbys if names is None or each.name in names]
        is_ready = all(each.state != launch_pb2.StandbyStatus.STARTING for each in standbys)
        if is_ready and cluster.dense_status().state == dense_pb2.DenseStatus.SERVING:
            return status
        assert time.monotonic() < deadline, f"not ready within {READY_TIMEOUT_S} s: {status}"
        time.sleep(0.2)


def kill(cluster: Cluster, streams: Streams, control: launch_pb2_grpc.LauncherStub, name: str, kind: Kind) -> None:
    """Kills workers once and measures the pause."""
    status = wait_ready(cluster, control, ALL_KINDS[name])
    time.sleep(SETTLED_S)
    pids = [service.pid for service in status.services if service.name in ALL_KINDS[name]]
    log_bytes, begin_s = cluster.log_file.stat().st_size, time.time()
    for pid in pids:
        os.kill(pid, signal.SIGSTOP if name == "stopped" else signal.SIGKILL)
    if name == "stopped":
        begin_s = wait_for(cluster, log_bytes, *PHASES["noticed by the launcher"])
    back_s = wait_for(cluster, log_bytes, *PHASES["gateway back"])
    deadline = time.monotonic() + RECOVERY_TIMEOUT_S
    while not streams.have_tokens_since(back_s, NUM_TOKENS_AFTER):
        assert time.monotonic() < deadline, f"streams do not go on {RECOVERY_TIMEOUT_S} s after a kill: {name}"
        time.sleep(POLL_S)
    returns_s = [min(time_s for time_s in times if time_s > back_s) for times in streams.token_times_s]
    kind.gaps_s.append(max(returns_s) - begin_s if name == "stopped" else streams.longest_gap(begin_s))
    log = cluster.log_file.read_bytes()[log_bytes:].decode()
    timeline = {phase: first_event(log, *where) for phase, where in PHASES.items()}
    timeline |= {"first stream goes on": min(returns_s), "last stream goes on": max(returns_s)}
    kind.timelines.append({phase: at - begin_s for phase, at in timeline.items()})
    print(f"{name}: {kind.gaps_s[-1]:.2f} s", file=sys.stderr, flush=True)


def wait_for(cluster: Cluster, log_bytes: int, service: str, pattern: str) -> float:
    deadline = time.monotonic() + RECOVERY_TIMEOUT_S
    while True:
        with contextlib.suppress(StopIteration):
            return first_event(cluster.log_file.read_bytes()[log_bytes:].decode(), service, pattern)
        assert time.monotonic() < deadline, f"{pattern} is not logged within {RECOVERY_TIMEOUT_S} s"
        time.sleep(POLL_S)


def first_event(log: str, service: str, pattern: str) -> float:
    """When an event was logged first, in seconds since 1970. Raises `StopIteration` if it was not."""
    lines = (line for line in log.splitlines() if f"service={service} " in line and re.search(pattern, line))
    return datetime.datetime.fromisoformat(re.findall(r"timestamp=(\S+)", next(lines))[0]).timestamp()


@contextlib.contextmanager
def busy_processes(count: int) -> Iterator[None]:
    """Processes that compete for the CPU."""
    processes = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


@dataclass
class Result:
    """What was measured with one setting of standbys."""

    kinds: dict[str, Kind]
    streams: Streams
    status: launch_pb2.LauncherStatus


def measure(arguments: argparse.Namespace, *standbys: str) -> Result:
    """All kills in one cluster with these settings of standbys."""
    limits = ["launch.max_restarts=1000", "launch.restart_window_s=1", f"watchdog.stall_timeout_s={STALL_TIMEOUT_S}"]
    kinds = {name: Kind() for name in arguments.kinds}
    settings = [*limits, *standbys, *arguments.set]
    with tempfile.TemporaryDirectory() as directory, running_cluster(Path(directory), *settings) as cluster:
        control = launcher(cluster)
        status = wait_ready(cluster, control)
        sizes = (arguments.streams, arguments.prompt_tokens, arguments.max_tokens)
        try:
            with busy_processes(arguments.busy), Streams(cluster, *sizes) as streams:
                end_s = time.monotonic() + arguments.seconds
                for _ in range(arguments.kills):
                    for name, kind in kinds.items():
                        if time.monotonic() > end_s:
                            break
                        kill(cluster, streams, control, name, kind)
        finally:
            if arguments.log is not None:
                with arguments.log.open("a") as log:
                    log.write(cluster.log_file.read_text())
    return Result(kinds, streams, status)


def percentile(values: Sequence[float], percent: int) -> float:
    """The smallest value that so many percent of the values do not exceed."""
    return sorted(values)[max(0, -(-percent * len(values) // 100) - 1)]


def print_gaps(results: dict[str, Result]) -> None:
    """Prints the longest gap in any stream, by percentile of the kills."""
    print("| killed | standbys | kills | longest gap in any stream: P50, s | P90, s | P99, s | longest, s |")
    print("|---|---|---|---|---|---|---|")
    for mode, result in results.items():
        for name, kind in result.kinds.items():
            if not kind.gaps_s:
                continue
            gaps = [percentile(kind.gaps_s, percent) for percent in (50, 90, 99, 100)]
            print(f"| {name} | {mode} | {len(kind.gaps_s)} | {' | '.join(f'{gap:.2f}' for gap in gaps)} |")


def print_timelines(results: dict[str, Result]) -> None:
    """Prints when each phase of the kill with the median gap was reached."""
    phases = [*PHASES, "first stream goes on", "last stream goes on"]
    print(f"\n| seconds after the kill with the median gap | {' | '.join(phases)} |")
    print(f"|---|{'---|' * len(phases)}")
    for mode, result in results.items():
        for name, kind in result.kinds.items():
            if not kind.gaps_s:
                continue
            timeline = kind.timelines[kind.gaps_s.index(percentile(kind.gaps_s, 50))]
            print(f"| {name}, standbys {mode} | {' | '.join(f'{timeline[phase]:.2f}' for phase in phases)} |")


def print_notes(results: dict[str, Result]) -> None:
    """Prints what became of the answers, and what the standbys cost."""
    print()
    for mode, result in results.items():
        streams = result.streams
        print(
            f"Standbys {mode}: {streams.num_answers} answers, {streams.num_wrong} of them not as without kills; "
            f"{len(streams.errors)} requests failed."
        )
        for error in streams.errors[:3]:
            print(f"A request failed: {error}", file=sys.stderr)
        for each in result.status.standbys:
            if each.pid:
                held = "weights loaded" if each.has_weights else "modules imported"
                memory = f"{each.host_bytes / MIB:.0f} MB of host and {each.device_bytes / MIB:.0f} MB of GPU memory"
                print(f"Standby of the {each.name}: {held}, {memory}.")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--max-tokens", type=int, default=200)
    parser.add_argument("--kills", type=int, default=5, help="of each kind (5)")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no kill after so many seconds")
    parser.add_argument("--kinds", nargs="+", choices=list(ALL_KINDS), default=list(KINDS))
    parser.add_argument("--standby", nargs="+", choices=list(MODES), default=list(MODES))
    parser.add_argument("--busy", type=int, default=2, help="processes that compete for the CPU (2)")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="of the cluster's config")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write all figures")
    parser.add_argument("--log", type=Path, metavar="FILE", help="to which the logs of all services are appended")
    arguments = parser.parse_args()
    results = {mode: measure(arguments, *MODES[mode]) for mode in arguments.standby}
    print_gaps(results)
    print_timelines(results)
    print_notes(results)
    if arguments.json is not None:
        figures = {mode: {name: asdict(kind) for name, kind in it.kinds.items()} for mode, it in results.items()}
        arguments.json.write_text(json.dumps(figures, indent=1))
    return int(any(result.streams.num_wrong or result.streams.errors for result in results.values()))


if __name__ == "__main__":
    sys.exit(main())
