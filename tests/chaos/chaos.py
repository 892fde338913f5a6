"""One chaos run: a monkey kills and stops the workers under streams, whose answers must equal undisturbed ones.

Afterwards nothing of the run may be left: no sequence, block, reservation of a block, process or shared memory.
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

import httpx2

from services.channel.region import NAME_PREFIX, SHM_DIR
from services.pb import gateway_pb2, launch_pb2
from tests.chaos.cases import Cancelled, draw_messages, draw_search, seen_over, send, transports
from tests.chaos.drafts import speculation_settings
from tests.chaos.ends import read_ends, unexpected_ends
from tests.chaos.monkey import Monkey, launcher_stub
from tests.support.clients.http_clients import client
from tests.support.clients.streams import Collected, collect
from tests.support.cluster import Cluster, children_of, free_port, request, running_cluster

POOL_SEED = 0  # for the messages from which all runs choose
# The policy of the scheduler beside each source of drafts; runs take turns.
POLICIES = {
    "off": "guaranteed_no_evict",
    "suffix": "max_utilization",
    "draft_model": "max_utilization",
    "medusa": "guaranteed_no_evict",
    "eagle3": "max_utilization",
}
BLOCK_SIZE, NUM_BLOCKS = 16, 320  # too few for all sequences that may run at once
MAX_NUM_SEQS = 12
HOST_KV_BYTES = 8 * 2**20  # of the host tier, for each layer: more blocks than on the device, but not all
NUM_LAYERS = 4  # of the embedded model
ROLES = ("attn_worker", "dense_worker", "gateway")
STEP_LOG = "steps.jsonl"
IDLE_TIMEOUT_S = 60.0
STANDBY_TIMEOUT_S = 120.0
ACCEPTED = "twostroke_dense_spec_decode_num_accepted_tokens_total"
MAX_NEW_FILES = 16  # open in a gateway after a run, such as idle connections of clients


@dataclass(frozen=True)
class Size:
    """How much happens in a run."""

    num_messages: int  # in the pool
    num_streams: int  # per run
    max_tokens: int  # per answer
    max_actions: int
    wait_timeout_s: float | None = None  # of a step; some actions take longer
    stall_timeout_s: float | None = None  # None: no worker is stopped for good
    num_layers: int | None = None  # of the embedded model; None: all


SHORT = Size(num_messages=12, num_streams=12, max_tokens=100, max_actions=3)
LONG = Size(num_messages=40, num_streams=36, max_tokens=300, max_actions=8, wait_timeout_s=3.0, stall_timeout_s=8.0)


@dataclass(frozen=True)
class Arena:
    """A cluster, and the undisturbed answer to every message of the pool."""

    cluster: Cluster
    directory: Path
    size: Size
    messages: list[gateway_pb2.GenerateRequest]
    expected: list[Collected]
    num_files: int  # open in the gateway
    has_standbys: bool
    tier: Path | None  # the file of the host tier
    num_lanes: int


@contextlib.contextmanager
def arena(
    directory: Path,
    speculation: str,
    size: Size,
    *,
    has_standbys: bool,
    has_tier: bool = False,
    takes_turns: bool = False,
    num_lanes: int = 1,
    is_warm: bool = False,
) -> Iterator[Arena]:
    """Starts a cluster with a high limit of restarts, and gets the undisturbed answer to every message.

    Sources of drafts that compute them on the device have some in every step, whatever they cost. With several lanes
    there are searches, too, and sequences are preempted. With `takes_turns`, which needs the tier, they leave the cache
    and come back.
    """
    policy = "take_turns" if takes_turns else POLICIES[speculation]
    metrics_address = f"127.0.0.1:{free_port()}"
    settings = [
        f"scheduler.policy={policy if num_lanes == 1 else 'max_utilization'}",
        f"scheduler.num_lanes={num_lanes}",
        *speculation_settings(speculation, directory, size.num_layers),
        f"dense.metrics_address={metrics_address}",
        f"scheduler.max_num_seqs={MAX_NUM_SEQS}",
        f"attention.num_blocks={NUM_BLOCKS}",
        f"attention.block_size={BLOCK_SIZE}",
        f"dense.step_log={directory / STEP_LOG}",
        f"launch.metrics_address=127.0.0.1:{free_port()}",
        "launch.max_restarts=1000",
        "launch.restart_window_s=2",
        "launch.restart_delay_s=0.05",
    ]
    if has_standbys:
        settings += ["launch.standby_dense=auto", "launch.standby_attention=auto"]
    tier = directory / "host-kv" if has_tier else None
    if tier is not None:
        num_bytes = HOST_KV_BYTES * (size.num_layers or NUM_LAYERS)
        settings += [f"attention.host_kv_bytes={num_bytes}", f"attention.host_kv_path={tier}"]
    if size.num_layers is not None:
        settings.append(f"model.num_layers={size.num_layers}")
    if size.stall_timeout_s is not None:
        settings.append(f"watchdog.stall_timeout_s={size.stall_timeout_s}")
    if size.wait_timeout_s is not None:
        settings.append(f"channel.wait_timeout_s={size.wait_timeout_s}")
    modules = {"services.dense_worker": "tests.support.workers.speculating_dense_worker"}
    modules = {} if speculation in ("off", "suffix") else modules
    with running_cluster(directory, *settings, is_warm=is_warm, modules=modules) as cluster:
        messages = draw_messages(Random(POOL_SEED), size.num_messages, size.max_tokens)
        if num_lanes > 1:
            messages[::5] = [draw_search(Random(each), size.max_tokens) for each in range(0, len(messages), 5)]
        with ThreadPoolExecutor(len(messages)) as threads:
            expected = list(threads.map(lambda message: send(cluster, message, "grpc_stream"), messages))
        cluster.wait_idle(IDLE_TIMEOUT_S)
        if speculation != "off":
            assert _num_accepted_drafts(metrics_address) > 0, f"no draft of {speculation} was right"
        num_files = _num_files(cluster.pid_of("gateway"))
        yield Arena(cluster, directory, size, messages, expected, num_files, has_standbys, tier, num_lanes)


def run(arena: Arena, seed: int) -> list[str]:
    """Runs one seed. Returns the monkey's actions. Raises `AssertionError` for wrong answers and for leaks."""
    random, size, cluster = Random(seed), arena.size, arena.cluster
    timeouts = (size.wait_timeout_s, size.stall_timeout_s)
    options = {"has_standbys": arena.has_standbys, "tier": arena.tier}
    monkey = Monkey(cluster, Random(seed + 1), size.max_actions, *timeouts, **options)
    gateway_pid, log_size = cluster.pid_of("gateway"), cluster.log_file.stat().st_size
    indexes = random.sample(range(size.num_messages), size.num_streams)
    with ThreadPoolExecutor(size.num_streams + 1) as threads:
        streams = [threads.submit(_check_stream, arena, index, random.randrange(2**32)) for index in indexes]
        actions = threads.submit(monkey.run)
        try:
            errors = [error for stream in streams if (error := stream.exception()) is not None]
        finally:
            monkey.is_over.set()
        actions.result()
    assert not errors, f"{len(errors)} of {len(streams)} streams after {monkey.actions}: {errors[0]!r}"
    assert cluster.pid_of("gateway") == gateway_pid, "the gateway has died"
    _check_idle(arena)
    ends = read_ends(cluster.log_file.read_bytes()[log_size:].decode())
    assert not (wrong := unexpected_ends(ends, monkey.signals)), f"unexpected ends {wrong} after {monkey.actions}"
    _check_block_counts(arena)
    _check_leaks(arena)
    return monkey.actions


def _check_stream(arena: Arena, index: int, seed: int) -> None:
    """Sends one message of the pool over a random API, and sometimes cancels it. Compares the answer."""
    random, message, expected = Random(seed), arena.messages[index], arena.expected[index]
    time.sleep(random.uniform(0.0, 1.5))
    transport = random.choice(transports(message))
    expected = seen_over(transport, expected)
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
    """Waits until the last action is over. No sequence or answer may be open then."""
    cluster = arena.cluster
    cluster.wait_idle(IDLE_TIMEOUT_S)
    status = cluster.dense_status()
    assert (status.num_running, status.num_waiting) == (0, 0), status
    with client(cluster.http_address) as http:
        metrics = http.get("/metrics").text.splitlines()
    for name in ("twostroke_gateway_answers_open", "twostroke_gateway_answers_waiting"):
        [value] = [line.split()[1] for line in metrics if line.startswith(name + " ")]
        assert float(value) == 0, f"{name} {value}"


def _check_block_counts(arena: Arena) -> None:
    """Checks the scheduler's counts of blocks, which the step log of a single request shows.

    From its second step on, whether that was planned ahead or not, the request has its two blocks and reserves none.
    """
    log = arena.directory / STEP_LOG
    size_before, start = log.stat().st_size, time.time()
    prompt = list(range(5, 5 + BLOCK_SIZE))
    collect(arena.cluster.gateway, request(prompt, 3, ignore_eos=True, cache_salt=str(time.monotonic_ns())))
    deadline = time.monotonic() + IDLE_TIMEOUT_S
    while True:
        with log.open() as file:
            file.seek(size_before)
            steps = [json.loads(line) for line in file.read().split("\n")[:-1]]
        # Lines of earlier steps may be written late.
        own = [step for step in steps if step["timestamp"] >= start and step["num_seqs"]]
        if len(own) >= 2:
            break
        assert time.monotonic() < deadline
        time.sleep(0.02)
    second = own[1]
    assert second["num_blocks"] == NUM_BLOCKS
    assert second["num_free_blocks"] == NUM_BLOCKS - 2, f"the scheduler has lost blocks: {second}"
    assert second["num_reserved_blocks"] == 0, f"blocks are reserved for no sequence: {second}"
    arena.cluster.wait_idle(IDLE_TIMEOUT_S)


def _check_leaks(arena: Arena) -> None:
    cluster = arena.cluster
    status = _settled_status(arena)
    children = children_of(cluster.process.pid)
    named = [Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")[:160] for pid in children]
    assert len(children) == len(ROLES) + 2 * arena.has_standbys, f"{len(children)} processes: {named}"
    pids = {service.role: service.pid for service in status.services}
    for role in ("attn_worker", "dense_worker"):
        pid = pids[role]
        maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
        mapped = [line for line in maps if f"{SHM_DIR}/{NAME_PREFIX}" in line]
        assert len(mapped) == arena.num_lanes, f"{role} has mapped {mapped}"
    files = Path(f"/proc/{pids['attn_worker']}/fd").iterdir()
    owned = {os.readlink(file) for file in files}
    owned = {path for path in owned if path.startswith(f"{SHM_DIR}/{NAME_PREFIX}")}
    assert len(owned) == arena.num_lanes, f"the attention worker owns {owned}"
    num_files = _num_files(cluster.pid_of("gateway"))
    assert num_files <= arena.num_files + MAX_NEW_FILES, f"the gateway has {num_files} files open"


def _settled_status(arena: Arena) -> launch_pb2.LauncherStatus:
    """The launcher's status, once standbys are ready if there are any."""
    stub, deadline = launcher_stub(arena.cluster), time.monotonic() + STANDBY_TIMEOUT_S
    while True:
        status = stub.GetStatus(launch_pb2.GetStatusRequest(), timeout=IDLE_TIMEOUT_S)
        wanted = launch_pb2.StandbyStatus.READY if arena.has_standbys else launch_pb2.StandbyStatus.OFF
        if all(standby.state == wanted for standby in status.standbys):
            return status
        assert time.monotonic() < deadline, f"standbys are not ready: {status.standbys}"
        time.sleep(0.1)


def _num_accepted_drafts(metrics_address: str) -> float:
    text = httpx2.get(f"http://{metrics_address}/metrics", timeout=IDLE_TIMEOUT_S).text
    [line] = [line for line in text.splitlines() if line.startswith(ACCEPTED + " ")]
    return float(line.split()[1])


def _num_files(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))

