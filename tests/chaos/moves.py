"""`python -m tests.chaos.moves --seeds N`: attention workers come, go, hang and die under streams of every kind.

Every answer must be that of an undisturbed run. Afterwards nothing may be left: no sequence, block or shared memory.
A KV cache of 8 bits rounds so coarsely that log-probabilities depend on what else a step computes. So that no fault of
copied blocks passes for that, it runs with `dense.deterministic`, and all numbers must be equal to the last bit. With
`--split-context` a quarter of the streams needs the caches of two workers.
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
import time
import traceback
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import grpc

from services.channel.region import NAME_PREFIX, SHM_DIR
from services.common.config import EMBEDDED_MODEL
from services.pb import attn_pb2, attn_pb2_grpc, dense_pb2, gateway_pb2, launch_pb2
from tests.chaos.cases import GRPC, Cancelled, draw_messages, draw_search, send
from tests.chaos.ends import read_ends, unexpected_ends
from tests.chaos.monkey import ATTENTION, DENSE, MAX_STOP_S, Monkey
from tests.support.adapters import make_adapter
from tests.support.clients.streams import Collected
from tests.support.cluster import Cluster, children_of, request, running_cluster
from tests.support.process_memory import resident_bytes
from tests.support.prompt_vectors import embeds_of, random_vectors

POOL_SEED = 0
ADAPTERS = ("first", "second")
NUM_VECTORS = 60  # of a prompt
POLICIES = ("max_utilization", "guaranteed_no_evict")
KV_CACHE_DTYPES = ("model", "int8", "fp8")
NUM_BLOCKS = 160  # of each worker: too few for all streams at once, if there is only one
LARGE_CHARACTERS, MAX_FORKED_CHARACTERS = (2000, 3000), 300
NUM_SPLIT_BLOCKS = 60  # the same with split contexts
TOO_LARGE = "all caches together have"  # of what the workers that are left cannot hold
MAX_NUM_SEQS = 16
MAX_WORKERS = 4
STALL_TIMEOUT_S, WAIT_TIMEOUT_S = 8.0, 4.0
DRAIN_TIMEOUT_S, IDLE_TIMEOUT_S = 60.0, 90.0
MAX_GROWTH_BYTES = 128 * 2**20  # of the gateway and the launcher, which never end


@dataclass(frozen=True)
class Size:
    """How much happens in a run."""

    num_streams: int
    max_tokens: int  # per answer
    max_actions: int


SHORT = Size(num_streams=16, max_tokens=60, max_actions=2)
LONG = Size(num_streams=40, max_tokens=200, max_actions=8)


@dataclass(frozen=True)
class Arena:
    """A cluster, and the undisturbed answer to every message."""

    cluster: Cluster
    size: Size
    messages: list[gateway_pb2.GenerateRequest]
    expected: list[Collected]
    tolerance: float  # of log-probabilities
    refused: list[int] = field(default_factory=list)  # messages that the workers left in a run could not hold


@contextlib.contextmanager
def arena(
    directory: Path,
    policy: str,
    size: Size,
    kv_cache_dtype: str = "model",
    *,
    splits_context: bool = False,
    is_warm: bool = False,
) -> Iterator[Arena]:
    """Starts a cluster of two attention workers, and gets the undisturbed answer to every message."""
    is_deterministic = kv_cache_dtype != "model"
    adapters = [make_adapter(directory / name, EMBEDDED_MODEL, seed=seed) for seed, name in enumerate(ADAPTERS)]
    modules = json.dumps([f"{path.name}={path}" for path in adapters])
    settings = [
        "attention.workers=2",
        f"attention.host_kv_bytes={2**23}",
        f"scheduler.policy={policy}",
        f"scheduler.max_num_seqs={MAX_NUM_SEQS}",
        f"attention.num_blocks={NUM_SPLIT_BLOCKS if splits_context else NUM_BLOCKS}",
        f"attention.split_context={str(splits_context).lower()}",
        "attention.block_size=16",
        f"dense.max_loras={len(ADAPTERS)}",
        f"gateway.lora_modules={modules}",
        "gateway.enable_prompt_embeds=true",
        f"watchdog.stall_timeout_s={STALL_TIMEOUT_S}",
        f"channel.wait_timeout_s={WAIT_TIMEOUT_S}",
        "launch.max_restarts=1000",
        "launch.restart_window_s=2",
        "launch.restart_delay_s=0.05",
        f"attention.kv_cache_dtype={kv_cache_dtype}",
        f"dense.deterministic={str(is_deterministic).lower()}",
    ]
    with running_cluster(directory, *settings, is_warm=is_warm) as cluster:
        messages = _messages(Random(POOL_SEED), size)
        if splits_context:
            _enlarge_some(messages, Random(POOL_SEED), size)
        with ThreadPoolExecutor(len(messages)) as threads:
            expected = list(threads.map(lambda message: send(cluster, message, "grpc_stream"), messages))
        yield Arena(cluster, size, messages, expected, 0.0 if is_deterministic else 1e-3)


def _messages(random: Random, size: Size) -> list[gateway_pb2.GenerateRequest]:
    """Those of `draw_messages`, and adapters, vectors in prompts and searches, which take turns."""
    messages = draw_messages(random, size.num_streams, size.max_tokens)
    for index, message in enumerate(messages):
        if index % 4 == 1:
            message.model = ADAPTERS[index // 4 % len(ADAPTERS)]
        elif index % 8 == 2:
            messages[index] = draw_search(random, size.max_tokens)
        elif index % 8 == 6:
            message.prompt_embeds.CopyFrom(embeds_of(random_vectors(EMBEDDED_MODEL, NUM_VECTORS, seed=index)))
            message.ClearField("prompt_logprobs")
    return messages


def _enlarge_some(messages: list[gateway_pb2.GenerateRequest], random: Random, size: Size) -> None:
    """Every fourth one then needs more than one cache. What has several answers must fit into one."""
    text = (EMBEDDED_MODEL / "documents.txt").read_text() * 4  # a short one
    for index, message in enumerate(messages):
        if index % 4 == 3:
            start = random.randrange(len(text) - LARGE_CHARACTERS[1])
            options = {"temperature": 0.8, "seed": index} if index % 8 == 3 else {"logprobs": 2}
            length = random.randint(*LARGE_CHARACTERS)
            messages[index] = request(text[start : start + length], 2 * size.max_tokens, ignore_eos=True, **options)
        elif message.n > 1 or message.HasField("beam_search"):
            message.prompt = message.prompt[:MAX_FORKED_CHARACTERS]


class Mover(Monkey):
    """A monkey that also adds attention workers and drains them."""

    def __init__(self, cluster: Cluster, random: Random, max_actions: int) -> None:
        super().__init__(cluster, random, max_actions, WAIT_TIMEOUT_S, STALL_TIMEOUT_S, has_standbys=False)
        self._kinds = [
            self._add,
            self._drain,
            self._drain,
            self._drain_two,
            self._drain_all,
            self._drain_and_signal,
            self._drain_and_signal,
            self._drain_and_signal,
            self._drain_and_stop,
            self._drain_and_stop,
            self._drain_and_leave,
            self._add_and_drain,
            self._add_and_signal,
            self._kill_attention,
            self._kill_dense,
            self._stop_some,
            self._stop_for_longer_than_a_wait,
            self._stop_for_good,
            self._terminate,
        ]

    def workers(self) -> dict[str, int]:
        """The process of each attention worker, by its name; that which stays comes first."""
        status = self._launcher.GetStatus(launch_pb2.GetStatusRequest(), timeout=IDLE_TIMEOUT_S)
        return {each.name: each.pid for each in status.services if each.role == ATTENTION}

    def _add(self) -> bool:
        if len(self.workers()) < MAX_WORKERS:
            self._ask(self._launcher.AddAttention, launch_pb2.AddAttentionRequest())
        return True

    def _drain(self) -> bool:
        self._ask_to_drain(self._movable())
        return True

    def _drain_two(self) -> bool:
        """At once; perhaps the same one."""
        with ThreadPoolExecutor(2) as threads:
            calls = [threads.submit(self._ask_to_drain, self._movable()) for _ in range(2)]
            for call in calls:
                call.result()
        return True

    def _drain_all(self) -> bool:
        """But the one that stays."""
        for name in list(self.workers())[1:]:
            self._ask_to_drain(name)
        return True

    def _drain_and_signal(self) -> bool:
        """The worker that sequences leave, or one to which they go, or the dense worker ends, or hangs."""
        with self._draining() as name:
            number = self._random.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP])
            self._kill(self._one_of(name), number)
        return True

    def _drain_and_stop(self) -> bool:
        """The same for a while."""
        with self._draining() as name, self._paused(self._one_of(name)):
            time.sleep(self._random.uniform(0.01, MAX_STOP_S))
        return True

    def _drain_and_leave(self) -> bool:
        """The client of a drain goes away."""
        message = launch_pb2.DrainAttentionRequest(name=self._movable(), timeout_ms=round(1000 * DRAIN_TIMEOUT_S))
        call = self._launcher.DrainAttention.future(message)
        time.sleep(self._random.uniform(0.0, 0.3))
        call.cancel()
        return True

    def _add_and_drain(self) -> bool:
        """In a loop."""
        for _ in range(3):
            self._add()
            self._drain()
        return True

    def _add_and_signal(self) -> bool:
        """Whoever is there ends, or hangs, while one more worker starts."""
        with ThreadPoolExecutor(1) as threads:
            adding = threads.submit(self._add)
            time.sleep(self._random.uniform(0.0, 3.0))
            number = self._random.choice([signal.SIGKILL, signal.SIGSTOP])
            self._kill(self._random.choice([*self.workers().values(), self._serving_pid(DENSE)]), number)
            adding.result()
        return True

    @contextlib.contextmanager
    def _draining(self) -> Iterator[str]:
        """A worker that is being drained, and has begun to be if it had any sequence."""
        name = self._movable()
        with ThreadPoolExecutor(1) as threads:
            draining: Future[None] = threads.submit(self._ask_to_drain, name)
            time.sleep(self._random.uniform(0.0, 0.5))
            try:
                yield name
            finally:
                draining.result()

    def _movable(self) -> str:
        """A worker that may be drained; if there is none, one is added."""
        while len(names := list(self.workers())) < 2:
            self._add()
        return self._random.choice(names[1:])

    def _one_of(self, name: str) -> int:
        """The process of a worker that is drained, of one that stays, or of the dense worker."""
        workers = self.workers()
        others = [pid for each, pid in workers.items() if each != name]
        leaving = workers.get(name, others[0])
        return self._random.choice([leaving, self._random.choice(others), self._serving_pid(DENSE)])

    @contextlib.contextmanager
    def _paused(self, pid: int) -> Iterator[None]:
        try:
            with contextlib.suppress(ProcessLookupError):  # it has just been drained
                os.kill(pid, signal.SIGSTOP)
            yield
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    def _ask_to_drain(self, name: str) -> None:
        message = launch_pb2.DrainAttentionRequest(name=name, timeout_ms=round(1000 * DRAIN_TIMEOUT_S))
        self._ask(self._launcher.DrainAttention, message)

    def _ask(self, method: grpc.UnaryUnaryMultiCallable, message: object) -> None:
        """Each call must succeed, or say in words why nothing has changed."""
        start_s = time.monotonic()
        try:
            method(message, timeout=2 * DRAIN_TIMEOUT_S + IDLE_TIMEOUT_S)
        except grpc.RpcError as error:
            known = (grpc.StatusCode.ABORTED, grpc.StatusCode.INVALID_ARGUMENT)
            goes_on = " goes on: " in (error.details() or "")  # what it has fits nowhere else, or nobody else is left
            is_known = error.code() in known or (goes_on and error.code() is grpc.StatusCode.UNAVAILABLE)
            assert is_known, f"{error.code()}: {error.details()}"
            self.actions[-1] += f" ({error.details()})"
        self.actions[-1] += f" {time.monotonic() - start_s:.1f} s"


def run(arena: Arena, seed: int) -> list[str]:
    """Runs one seed. Returns what the monkey did. Raises `AssertionError` for wrong answers and for what is left."""
    random, cluster = Random(seed), arena.cluster
    arena.refused.clear()
    mover = Mover(cluster, Random(seed + 1), arena.size.max_actions)
    gateway_pid, log_size = cluster.pid_of("gateway"), cluster.log_file.stat().st_size
    with ThreadPoolExecutor(len(arena.messages) + 1) as threads:
        streams = [
            threads.submit(_check_stream, arena, index, random.randrange(2**32)) for index in range(len(arena.messages))
        ]
        actions = threads.submit(mover.run)
        try:
            errors = [error for stream in streams if (error := stream.exception()) is not None]
        finally:
            mover.is_over.set()
        actions.result()
    assert not errors, f"{len(errors)} of {len(streams)} streams after {mover.actions}: {errors[0]!r}"
    assert cluster.pid_of("gateway") == gateway_pid, "the gateway has died"
    _check_nothing_left(arena, mover)
    ends = read_ends(cluster.log_file.read_bytes()[log_size:].decode())
    assert not (wrong := unexpected_ends(ends, mover.signals)), f"unexpected ends {wrong} after {mover.actions}"
    return mover.actions


def _check_stream(arena: Arena, index: int, seed: int) -> None:
    """Sends a message, and sometimes goes away. Compares the answer."""
    random, message, expected = Random(seed), arena.messages[index], arena.expected[index]
    time.sleep(random.uniform(0.0, 1.5))
    chunks_left = random.randint(1, 30) if random.random() < 0.15 else -1

    def on_chunk() -> None:
        nonlocal chunks_left
        chunks_left -= 1
        if chunks_left == 0:
            raise Cancelled

    try:
        collected = send(arena.cluster, message, random.choice(GRPC) if chunks_left < 0 else GRPC[0], on_chunk)
    except grpc.RpcError as error:
        if TOO_LARGE not in (error.details() or ""):
            raise
        arena.refused.append(index)  # a worker has been taken away, or does not come back soon enough
        return
    try:
        if chunks_left == 0:
            for each, token_ids in collected.token_ids.items():
                assert token_ids == expected.token_ids[each][: len(token_ids)]
        else:
            collected.assert_equals(expected, arena.tolerance)
    except AssertionError as error:
        raise AssertionError(f"message {index}: {message}: {error}") from error


def _check_nothing_left(arena: Arena, mover: Mover) -> None:
    """Waits until all workers are attached again, with all of their blocks free on both sides."""
    cluster, deadline = arena.cluster, time.monotonic() + 2 * IDLE_TIMEOUT_S
    for _ in range(2):
        while (reason := _what_is_left(cluster, mover)) is not None:
            assert time.monotonic() < deadline, f"after {mover.actions}: {reason}"
            time.sleep(0.1)
        cluster.generate("Count", 3)  # the dense worker lets go of a worker that has gone when the next step begins
    num_children, num_workers = len(children_of(cluster.process.pid)), len(mover.workers())
    assert num_children == num_workers + 2, f"{num_children} processes"
    for pid, num_regions in ((mover.workers()["attn_worker"], 1), (cluster.pid_of(DENSE), num_workers)):
        maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
        mapped = [line for line in maps if f"{SHM_DIR}/{NAME_PREFIX}" in line]
        assert len(mapped) == num_regions, f"{pid} has mapped {mapped}"


def _what_is_left(cluster: Cluster, mover: Mover) -> str | None:
    try:
        status = cluster.dense_status()
        if (status.num_running, status.num_waiting) != (0, 0) or status.state != dense_pb2.DenseStatus.SERVING:
            return str(status)
        if len(status.attention_workers) != len(mover.workers()):
            return f"{len(status.attention_workers)} attention workers of {len(mover.workers())}"
        for each in status.attention_workers:
            if (each.num_sequences, each.num_free_blocks) != (0, each.num_blocks):
                return f"the dense worker counts {each}"
            with grpc.insecure_channel(each.address) as channel:
                found = attn_pb2_grpc.AttentionWorkerStub(channel).GetStatus(attn_pb2.GetStatusRequest(), timeout=5.0)
            if (found.num_sequences, found.num_free_blocks) != (0, found.num_blocks):
                return f"{each.address} has {found}"
    except grpc.RpcError as error:
        return repr(error)
    return None


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="tests.chaos.moves", description=__doc__)
    parser.add_argument("--seeds", type=int, default=8, metavar="N", help="number of runs, %(default)s by default")
    parser.add_argument("--first-seed", type=int, default=1, metavar="S", help="of the first run; the next adds 1")
    parser.add_argument("--short", action="store_true", help="runs of fewer streams and actions")
    parser.add_argument("--policy", nargs="+", choices=POLICIES, default=POLICIES, help="of the scheduler")
    parser.add_argument("--kv-cache-dtype", choices=KV_CACHE_DTYPES, default="model", help="%(default)s by default")
    parser.add_argument("--split-context", action="store_true", help="with streams that need two workers each")
    arguments = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # as an exception, so that everything is closed
    seeds = range(arguments.first_seed, arguments.first_seed + arguments.seeds)
    for policy in arguments.policy:
        seed, directory = None, Path(tempfile.mkdtemp(prefix="moves-"))
        try:
            size, splits_context = SHORT if arguments.short else LONG, arguments.split_context
            with arena(
                directory, policy, size, arguments.kv_cache_dtype, splits_context=splits_context
            ) as where:
                lasting = {"gateway": where.cluster.pid_of("gateway"), "launcher": where.cluster.process.pid}
                before = {name: resident_bytes(pid) for name, pid in lasting.items()}
                for seed in seeds:
                    start_s = time.monotonic()
                    actions = run(where, seed)
                    grown = {name: resident_bytes(pid) - before[name] for name, pid in lasting.items()}
                    memory = ", ".join(f"{name} {each / 2**20:+.0f} MB" for name, each in grown.items())
                    duration = f"{time.monotonic() - start_s:.1f} s, {len(where.refused)} refused"
                    print(f"seed {seed}, {policy}: {', '.join(actions)}: {duration}; {memory}", flush=True)
                    assert max(grown.values()) < MAX_GROWTH_BYTES, memory
        except Exception:
            traceback.print_exc()
            options = f"--policy {policy} --kv-cache-dtype {arguments.kv_cache_dtype}{' --short' * arguments.short}"
            options += " --split-context" * arguments.split_context
            print(f"FAILED: seed {seed}, {policy}; again: python -m tests.chaos.moves --first-seed {seed} --seeds 1 "
                  f"{options}\nlogs: {directory}", file=sys.stderr)
            return 1
        shutil.rmtree(directory)
    return 0


if __name__ == "__main__":
    sys.exit(main())
