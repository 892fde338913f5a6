"""`python -m tests.chaos.ranks --seeds N`: the processes of two ranks die and hang, alone and two at once.

Streams are of every kind: adapters, beams, forms, vectors in prompts, drafts, log-probabilities. Every answer must be
that of an undisturbed run, and no process may end but those that a signal was sent to: so others keep their caches. The
second of two processes often ends while the first one's successor takes over.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import grpc

from services.common.config import EMBEDDED_MODEL
from services.pb import dense_pb2, gateway_pb2, launch_pb2
from tests.chaos.cases import GRPC, draw_messages, draw_search, send
from tests.chaos.ends import read_ends, unexpected_ends
from tests.chaos.monkey import MIN_RUNNING_FOR_TWO_CRASHES, MIN_STEPS_BETWEEN_CRASHES, launcher_stub
from tests.support.adapters import make_adapter
from tests.support.clients.streams import Collected
from tests.support.cluster import Cluster, running_cluster
from tests.support.prompt_vectors import embeds_of, random_vectors
from tests.support.rank_processes import PROCESSES, STANDBYS

POOL_SEED = 0
ADAPTERS = ("first", "second")
NUM_STREAMS, MAX_TOKENS, MAX_ACTIONS = 24, 200, 5
STALL_TIMEOUT_S = 8.0
MAX_DELAYS_S = (0.1, 0.3, 2.0)  # between two signals: while ranks meet, while streams begin again, later
RECOVERY_S = 120.0
DRAFTS = ("scheduler.speculation=draft_model", f"scheduler.draft_model={EMBEDDED_MODEL}")
TENSORS, STAGES = "dense.tensor_parallel_size=2", "dense.pipeline_parallel_size=2"
ARRANGEMENTS = {
    "tensor": (TENSORS, *STANDBYS),
    "stages": (STAGES,),
    "tensor-tier": (TENSORS, f"attention.host_kv_bytes={2**23}"),
    "stages-lanes": (STAGES, "scheduler.num_lanes=2", *STANDBYS),
    "tensor-drafts": (TENSORS, *DRAFTS),
    "stages-drafts": (STAGES, *DRAFTS, *STANDBYS),
}
RUNS_PER_CLUSTER = 3


@dataclass(frozen=True)
class Arena:
    """A cluster, and the undisturbed answer to every message."""

    cluster: Cluster
    messages: list[gateway_pb2.GenerateRequest]
    expected: list[Collected]
    signals: dict[int, set[signal.Signals]] = field(default_factory=dict)  # sent, by process


@contextlib.contextmanager
def arena(directory: Path, *settings: str) -> Iterator[Arena]:
    """Starts a cluster of two ranks, and gets the undisturbed answer to every message."""
    has_lanes = "scheduler.num_lanes=2" in settings  # then there are no adapters
    names = () if has_lanes else ADAPTERS
    adapters = [make_adapter(directory / name, EMBEDDED_MODEL, seed=seed) for seed, name in enumerate(names)]
    common = (
        f"dense.max_loras={len(names)}",
        f"gateway.lora_modules={json.dumps([f'{path.name}={path}' for path in adapters])}",
        "gateway.enable_prompt_embeds=true",
        f"watchdog.stall_timeout_s={STALL_TIMEOUT_S}",
        "launch.restart_window_s=2",
        "launch.restart_delay_s=0.05",
    )
    with running_cluster(directory, *common, *settings, "launch.max_restarts=1000", is_warm=True) as cluster:
        messages = _messages(Random(POOL_SEED), names)
        with ThreadPoolExecutor(len(messages)) as threads:
            expected = list(threads.map(lambda message: send(cluster, message, GRPC[0]), messages))
        yield Arena(cluster, messages, expected)


def _messages(random: Random, adapters: Sequence[str]) -> list[gateway_pb2.GenerateRequest]:
    messages = draw_messages(random, NUM_STREAMS, MAX_TOKENS)
    for index, message in enumerate(messages):
        if index % 4 == 1 and adapters:
            message.model = adapters[index // 4 % len(adapters)]
        elif index % 8 == 2:
            messages[index] = draw_search(random, MAX_TOKENS)
        elif index % 8 == 6:
            message.prompt_embeds.CopyFrom(embeds_of(random_vectors(EMBEDDED_MODEL, 60, seed=index)))
            message.ClearField("prompt_logprobs")
    return messages


class RankMonkey:
    """`run` works until `is_over` is set; `actions` lists what was done."""

    def __init__(self, cluster: Cluster, random: Random, signals: dict[int, set[signal.Signals]]) -> None:
        """`signals`: what was sent to each process, also by others, to which it adds."""
        self._cluster, self._random, self._signals = cluster, random, signals
        self._launcher = launcher_stub(cluster)
        self.is_over = threading.Event()
        self.actions: list[str] = []

    def run(self) -> None:
        while len(self.actions) < MAX_ACTIONS and not self.is_over.wait(self._random.uniform(0.05, 0.8)):
            self.actions.append("")
            before = self._num_steps()
            kind = self._random.choice([self._one, self._two, self._two, self._two, self._with_standby, self._pause])
            kind()
            self._await_recovery(before)

    def _one(self) -> None:
        number = self._random.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP])
        self._signal(self._random.choice(PROCESSES), number)

    def _two(self) -> None:
        """One after the other; the second may be the first one's successor."""
        if self._cluster.dense_status().num_running < MIN_RUNNING_FOR_TWO_CRASHES:
            self._one()  # a sequence that runs alone in two crashes is failed
            return
        self._signal(self._random.choice(PROCESSES), self._random.choice([signal.SIGKILL] * 3 + [signal.SIGSTOP]))
        time.sleep(self._random.uniform(0.0, self._random.choice(MAX_DELAYS_S)))
        self._signal(self._random.choice(PROCESSES), signal.SIGKILL)

    def _with_standby(self) -> None:
        name = self._random.choice(PROCESSES)
        for pid in [each.pid for each in self._status().standbys if each.name == name and each.pid]:
            self._send(pid, f"standby of {name}", signal.SIGKILL)
        self._signal(name, signal.SIGKILL)

    def _pause(self) -> None:
        """Shorter than the watchdog waits."""
        name = self._random.choice(PROCESSES)
        [pid] = [each.pid for each in self._status().services if each.name == name]
        self.actions[-1] += f"pause {name} "
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
            time.sleep(self._random.uniform(0.01, 1.5))
            os.kill(pid, signal.SIGCONT)

    def _signal(self, name: str, number: signal.Signals) -> None:
        [pid] = [each.pid for each in self._status().services if each.name == name]
        self._send(pid, name, number)

    def _send(self, pid: int, name: str, number: signal.Signals) -> None:
        self.actions[-1] += f"{number.name} {name} "
        self._signals.setdefault(pid, set()).add(number)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)

    def _status(self) -> launch_pb2.LauncherStatus:
        return self._launcher.GetStatus(launch_pb2.GetStatusRequest(), timeout=RECOVERY_S)

    def _num_steps(self) -> tuple[int, int]:
        """Of the dense worker that serves now, whose process comes first."""
        [pid] = [each.pid for each in self._status().services if each.name == PROCESSES[0]]
        with contextlib.suppress(grpc.RpcError):
            status = self._cluster.dense_status()
            if status.state == dense_pb2.DenseStatus.SERVING:
                return pid, status.num_steps
        return pid, -1

    def _await_recovery(self, before: tuple[int, int]) -> None:
        """Waits until every sequence has had enough steps for a token, and others serve in place of the signalled ones.
        """
        deadline = time.monotonic() + RECOVERY_S
        while not self.is_over.is_set():
            pid, num_steps = self._num_steps()
            needed = MIN_STEPS_BETWEEN_CRASHES + (before[1] if pid == before[0] else 0)
            if num_steps >= needed and not self._signals.keys() & {each.pid for each in self._status().services}:
                return
            assert time.monotonic() < deadline, f"not recovered from {self.actions[-1]}"
            time.sleep(0.05)


def run(arena: Arena, seed: int) -> list[str]:
    """Runs one seed. Returns what the monkey did. Raises `AssertionError` for wrong answers and for unexpected ends."""
    cluster, random = arena.cluster, Random(seed)
    monkey = RankMonkey(cluster, Random(seed + 1), arena.signals)
    log_size = cluster.log_file.stat().st_size
    with ThreadPoolExecutor(NUM_STREAMS + 1) as threads:
        streams = [threads.submit(_check_stream, arena, i, random.uniform(0.0, 1.5)) for i in range(NUM_STREAMS)]
        actions = threads.submit(monkey.run)
        try:
            errors = [error for stream in streams if (error := stream.exception()) is not None]
        finally:
            monkey.is_over.set()
        actions.result()
    assert not errors, f"{len(errors)} of {len(streams)} streams after {monkey.actions}: {errors[0]!r}"
    cluster.wait_idle(RECOVERY_S)
    ends = read_ends(cluster.log_file.read_bytes()[log_size:].decode())
    assert not (wrong := unexpected_ends(ends, arena.signals)), f"unexpected ends {wrong} after {monkey.actions}"
    return monkey.actions


def _check_stream(arena: Arena, index: int, delay_s: float) -> None:
    time.sleep(delay_s)
    collected = send(arena.cluster, arena.messages[index], GRPC[0])
    try:
        collected.assert_equals(arena.expected[index])
    except AssertionError as error:
        raise AssertionError(f"message {index}: {arena.messages[index]}: {error}") from error


def main(argv: Sequence[str] | None = None) -> int:
    """Prints one line per seed; ends at the first failure."""
    parser = argparse.ArgumentParser(prog="tests.chaos.ranks", description=__doc__)
    parser.add_argument("--seeds", type=int, default=20, metavar="N", help="number of runs, %(default)s by default")
    parser.add_argument("--first-seed", type=int, default=1, metavar="S", help="of the first run; the next adds 1")
    parser.add_argument("--arrangement", choices=[*ARRANGEMENTS], help="of all runs; by default, they take turns")
    arguments = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # as an exception, so that everything is closed
    seeds = range(arguments.first_seed, arguments.first_seed + arguments.seeds)
    for cluster_number in sorted({seed // RUNS_PER_CLUSTER for seed in seeds}):
        name = arguments.arrangement or [*ARRANGEMENTS][cluster_number % len(ARRANGEMENTS)]
        directory, seed = Path(tempfile.mkdtemp(prefix="chaos-")), None
        try:
            with arena(directory, *ARRANGEMENTS[name]) as where:
                for seed in (seed for seed in seeds if seed // RUNS_PER_CLUSTER == cluster_number):
                    start = time.monotonic()
                    actions = run(where, seed)
                    print(f"seed {seed}, {name}: {', '.join(actions)}: {time.monotonic() - start:.1f} s", flush=True)
        except Exception:
            traceback.print_exc()
            again = f"python -m tests.chaos.ranks --first-seed {seed} --seeds 1 --arrangement {name}"
            print(f"FAILED: seed {seed}, {name}; again: {again}\nlogs: {directory}", file=sys.stderr)
            return 1
        shutil.rmtree(directory)
    return 0


if __name__ == "__main__":
    sys.exit(main())
