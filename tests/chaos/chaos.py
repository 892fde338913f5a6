"""One chaos run: streams of every kind while a monkey kills and stops the workers, compared with a quiet run.

Afterwards nothing may be left of it: no sequence, no block, no promise of a block, no process, no shared memory.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from random import Random

from services.channel.shm_cleanup import NAME_PREFIX, SHM_DIR
from services.pb import gateway_pb2
from tests.chaos.cases import GRPC_TRANSPORTS, TRANSPORTS, Cancelled, draw_messages, send
from tests.chaos.ends import ends_told_by, unordered_ends
from tests.chaos.monkey import Monkey
from tests.support.clients.http_clients import client
from tests.support.clients.streams import Collected, collect
from tests.support.cluster import Cluster, children_of, free_port, request, running_cluster

POOL_SEED = 0  # of the messages that all runs choose from
POLICIES = ("guaranteed_no_evict", "max_utilization")
BLOCK_SIZE, NUM_BLOCKS = 16, 320  # too few for all that may run at once
MAX_NUM_SEQS = 12
ROLES = ("attn_worker", "dense_worker", "gateway")
STEP_LOG = "steps.jsonl"
IDLE_TIMEOUT_S = 60.0
MAX_NEW_FILES = 16  # of a gateway that has lived through a run: idle connections of clients, and the like


@dataclass(frozen=True)
class Size:
    """How much happens in a run."""

    num_messages: int  # in the pool
    num_streams: int  # of a run
    max_tokens: int  # of an answer
    max_deeds: int
    wait_timeout_s: float | None = None  # of a step, which some deeds exceed
    stall_timeout_s: float | None = None  # None: nobody is stopped for good


SHORT = Size(num_messages=12, num_streams=12, max_tokens=150, max_deeds=3)
LONG = Size(num_messages=40, num_streams=36, max_tokens=300, max_deeds=8, wait_timeout_s=3.0, stall_timeout_s=8.0)


@dataclass(frozen=True)
class Arena:
    """A cluster, and what every message of the pool is answered with in peace."""

    cluster: Cluster
    directory: Path
    size: Size
    messages: list[gateway_pb2.GenerateRequest]
    expected: list[Collected]
    num_files: int  # open in the gateway


@contextlib.contextmanager
def arena(directory: Path, policy: str, size: Size) -> Iterator[Arena]:
    """Starts a cluster whose workers may die as often as they like, and asks everything once."""
    settings = [
        f"scheduler.policy={policy}",
        f"scheduler.max_num_seqs={MAX_NUM_SEQS}",
        f"attention.num_blocks={NUM_BLOCKS}",
        f"attention.block_size={BLOCK_SIZE}",
        f"dense.step_log={directory / STEP_LOG}",
        f"launch.metrics_address=127.0.0.1:{free_port()}",
        "launch.max_restarts=1000",
        "launch.restart_window_s=2",
        "launch.restart_delay_s=0.05",
    ]
    if size.stall_timeout_s is not None:
        settings.append(f"watchdog.stall_timeout_s={size.stall_timeout_s}")
    if size.wait_timeout_s is not None:
        settings.append(f"channel.wait_timeout_s={size.wait_timeout_s}")
    with running_cluster(directory, *settings) as cluster:
        messages = draw_messages(Random(POOL_SEED), size.num_messages, size.max_tokens)
        with ThreadPoolExecutor(len(messages)) as threads:
            expected = list(threads.map(lambda message: send(cluster, message, "grpc_stream"), messages))
        cluster.wait_idle(IDLE_TIMEOUT_S)
        yield Arena(cluster, directory, size, messages, expected, _num_files(cluster.pid_of("gateway")))


def run(arena: Arena, seed: int) -> list[str]:
    """Raises `AssertionError` for whatever is not as it should be; returns the monkey's deeds."""
    random, size, cluster = Random(seed), arena.size, arena.cluster
    monkey = Monkey(cluster, Random(seed + 1), size.max_deeds, size.wait_timeout_s, size.stall_timeout_s)
    gateway_pid, log_size = cluster.pid_of("gateway"), cluster.log_file.stat().st_size
    indexes = random.sample(range(size.num_messages), size.num_streams)
    with ThreadPoolExecutor(size.num_streams + 1) as threads:
        streams = [threads.submit(_check_stream, arena, index, random.randrange(2**32)) for index in indexes]
        deeds = threads.submit(monkey.run)
        try:
            errors = [error for stream in streams if (error := stream.exception()) is not None]
        finally:
            monkey.is_over.set()
        deeds.result()
    assert not errors, f"{len(errors)} of {len(streams)} streams after {monkey.deeds}: {errors[0]!r}"
    assert cluster.pid_of("gateway") == gateway_pid, "the gateway was not to die"
    _check_idle(arena)
    ends = ends_told_by(cluster.log_file.read_bytes()[log_size:].decode())
    assert not (wrong := unordered_ends(ends, monkey.signals)), f"nobody ordered {wrong} after {monkey.deeds}"
    _check_books(arena)
    _check_leaks(arena)
    return monkey.deeds


def _check_stream(arena: Arena, index: int, seed: int) -> None:
    """Sends one message of the pool, with or without cancelling it, over any API."""
    random, message, expected = Random(seed), arena.messages[index], arena.expected[index]
    time.sleep(random.uniform(0.0, 1.5))
    transport = random.choice(GRPC_TRANSPORTS if message.HasField("prompt_logprobs") else TRANSPORTS)
    chunks_left = random.randint(1, 60) if random.random() < 0.2 else None

    def on_chunk() -> None:
        nonlocal chunks_left
        if chunks_left is not None:
            chunks_left -= 1
            if chunks_left == 0:
                raise Cancelled

    collected = send(arena.cluster, message, transport, on_chunk)
    try:
        if chunks_left == 0:
            _assert_begins(collected, expected)
        else:
            collected.assert_equals(expected)
    except AssertionError as error:
        raise AssertionError(f"message {index} over {transport}: {_describe(collected, expected)}: {error}") from error


def _assert_begins(collected: Collected, expected: Collected) -> None:
    for index, token_ids in collected.token_ids.items():
        assert token_ids == expected.token_ids[index][: len(token_ids)]
        assert expected.text[index].startswith(collected.text[index])


def _describe(collected: Collected, expected: Collected) -> str:
    for index, token_ids in expected.token_ids.items():
        found = collected.token_ids[index]
        for position, (left, right) in enumerate(zip(token_ids, found, strict=False)):
            if left != right:
                return f"answer {index} differs from token {position} on"
        if len(found) != len(token_ids):
            return f"answer {index} has {len(found)} tokens, expected {len(token_ids)}"
    return "tokens are equal"


def _check_idle(arena: Arena) -> None:
    """Whatever the last deed was, it is over, and nobody has anything left."""
    cluster = arena.cluster
    cluster.wait_idle(IDLE_TIMEOUT_S)
    status = cluster.dense_status()
    assert (status.num_running, status.num_waiting) == (0, 0), status
    with client(cluster.http_address) as http:
        metrics = http.get("/metrics").text.splitlines()
    for name in ("twostroke_gateway_answers_open", "twostroke_gateway_answers_waiting"):
        [value] = [line.split()[1] for line in metrics if line.startswith(name + " ")]
        assert float(value) == 0, f"{name} {value}"


def _check_books(arena: Arena) -> None:
    """What the scheduler believes of the blocks, told by the step of a request that is alone."""
    log = arena.directory / STEP_LOG
    size_before = log.stat().st_size
    collect(arena.cluster.gateway, request([5] * BLOCK_SIZE, 3, ignore_eos=True, cache_salt=str(time.monotonic_ns())))
    deadline = time.monotonic() + IDLE_TIMEOUT_S
    while True:
        with log.open() as file:
            file.seek(size_before)
            lines = file.read().splitlines()
        if lines:
            break
        assert time.monotonic() < deadline
        time.sleep(0.02)
    first = json.loads(lines[0])
    assert first["num_blocks"] == NUM_BLOCKS
    assert first["num_free_blocks"] == NUM_BLOCKS - 2, f"the scheduler has lost blocks: {first}"
    assert first["num_reserved_blocks"] == 0, f"the scheduler keeps promises to nobody: {first}"
    arena.cluster.wait_idle(IDLE_TIMEOUT_S)


def _check_leaks(arena: Arena) -> None:
    cluster = arena.cluster
    children = children_of(cluster.process.pid)
    assert len(children) == len(ROLES), f"{len(children)} processes"
    for role in ("attn_worker", "dense_worker"):
        pid = cluster.pid_of(role)
        maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
        mapped = [line for line in maps if f"{SHM_DIR}/{NAME_PREFIX}" in line]
        assert len(mapped) == 1, f"{role} has mapped {mapped}"
    files = Path(f"/proc/{cluster.pid_of('attn_worker')}/fd").iterdir()
    owned = {os.readlink(file) for file in files}
    owned = {path for path in owned if path.startswith(f"{SHM_DIR}/{NAME_PREFIX}")}
    assert len(owned) == 1, f"the attention worker owns {owned}"
    num_files = _num_files(cluster.pid_of("gateway"))
    assert num_files <= arena.num_files + MAX_NEW_FILES, f"the gateway has {num_files} files open"


def _num_files(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))

