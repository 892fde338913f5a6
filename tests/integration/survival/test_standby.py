"""Standbys take over from workers that are killed: streams of every kind pause and get the same tokens."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from services.pb import gateway_pb2, launch_pb2
from tests.chaos.monkey import launcher_stub
from tests.support.clients.streams import Collected, collect_all, messages_of_every_kind
from tests.support.cluster import Cluster, ctl, free_port, running_cluster
from tests.support.models import TWO_LAYERS
from tests.support.scrape import Scrape

PROMPT = "Count from 1 to 500, slowly, and tell of every number what you like about it. " * 10
MAX_TOKENS = 70
WAIT_S = 60.0
MAX_ROUNDS = 5  # on a busy machine streams may end before they are disturbed
DENSE, ATTENTION = "dense_worker", "attn_worker"

pytestmark = pytest.mark.timeout(400)  # processes start several times, and the machine may be slow


@pytest.fixture(scope="module")
def metrics_address() -> str:
    return f"127.0.0.1:{free_port()}"


@pytest.fixture(scope="module", params=["loaded", "imports"])
def cluster(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, metrics_address: str
) -> Iterator[Cluster]:
    settings = [TWO_LAYERS, f"launch.standby_dense={request.param}", "launch.standby_attention=imports"]
    limits = ["launch.max_restarts=100", f"launch.metrics_address={metrics_address}"]
    attention = f"attention.metrics_address=127.0.0.1:{free_port()}"
    directory = tmp_path_factory.mktemp("standby")
    with running_cluster(directory, *settings, *limits, attention, is_warm=True) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def messages() -> list[gateway_pb2.GenerateRequest]:
    return messages_of_every_kind(PROMPT, MAX_TOKENS, stop="no such text")


@pytest.fixture(scope="module")
def undisturbed(cluster: Cluster, messages: list[gateway_pb2.GenerateRequest]) -> list[Collected]:
    return collect_all(cluster.gateway, messages)


def pids(cluster: Cluster) -> dict[str, int]:
    """The processes of the workers, and of standbys that are ready, by name."""
    status = launcher_stub(cluster).GetStatus(launch_pb2.GetStatusRequest(), timeout=WAIT_S)
    found = {service.role: service.pid for service in status.services if service.role in (DENSE, ATTENTION)}
    for standby in status.standbys:
        if standby.state == launch_pb2.StandbyStatus.READY:
            found[f"standby of {standby.role}"] = standby.pid
    return found


def until(is_done: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while not is_done():
        assert time.monotonic() < deadline, f"not within {WAIT_S} s: {what}"
        time.sleep(0.01)


def ready_pids(cluster: Cluster) -> dict[str, int]:
    """The processes, once both standbys are ready."""
    until(lambda: len(pids(cluster)) == 4, "both standbys are ready")
    return pids(cluster)


def disturbed(
    cluster: Cluster, messages: list[gateway_pb2.GenerateRequest], disturb: Callable[[], object]
) -> list[Collected]:
    """Reads all streams, and calls `disturb` while most of them run."""
    for _ in range(MAX_ROUNDS):
        with ThreadPoolExecutor(1) as threads:
            running = threads.submit(collect_all, cluster.gateway, messages)
            while cluster.dense_status().num_running <= len(messages) // 2 and not running.done():
                time.sleep(0.01)
            if not running.done():
                disturb()
                return running.result()
            running.result()
    raise AssertionError(f"in each of {MAX_ROUNDS} rounds the streams were not seen running")


def num_take_overs(metrics_address: str, role: str) -> float:
    return Scrape(metrics_address).value("twostroke_launch_take_overs_total", role=role)


@pytest.mark.parametrize("roles", [(DENSE,), (ATTENTION,), (DENSE, ATTENTION)], ids="+".join)
def test_the_standby_of_a_killed_worker_serves_its_streams(
    cluster: Cluster,
    messages: list[gateway_pb2.GenerateRequest],
    undisturbed: list[Collected],
    metrics_address: str,
    roles: tuple[str, ...],
) -> None:
    before = ready_pids(cluster)
    counts = {role: num_take_overs(metrics_address, role) for role in roles}
    after = dict[str, int]()

    def kill() -> None:
        for role in roles:
            os.kill(before[role], signal.SIGKILL)
        until(lambda: all(pids(cluster)[role] != before[role] for role in roles), "others serve")
        after.update(pids(cluster))

    for answer, expected in zip(disturbed(cluster, messages, kill), undisturbed, strict=True):
        answer.assert_equals(expected)
    for role in roles:
        assert after[role] == before[f"standby of {role}"], "the process that was ready serves now"
        assert num_take_overs(metrics_address, role) == counts[role] + 1
    cluster.wait_idle(WAIT_S)


def test_a_worker_that_dies_while_its_standby_is_dead_is_started_again(
    cluster: Cluster, messages: list[gateway_pb2.GenerateRequest], undisturbed: list[Collected]
) -> None:
    before = ready_pids(cluster)

    def kill() -> None:
        for name in (f"standby of {DENSE}", DENSE):
            os.kill(before[name], signal.SIGKILL)

    for answer, expected in zip(disturbed(cluster, messages, kill), undisturbed, strict=True):
        answer.assert_equals(expected)
    after = ready_pids(cluster)
    assert not {after[DENSE], after[f"standby of {DENSE}"]} & {*before.values()}


def test_a_worker_that_dies_when_it_has_just_taken_over_is_started_again(
    cluster: Cluster, messages: list[gateway_pb2.GenerateRequest], undisturbed: list[Collected]
) -> None:
    for _ in range(3):
        try:
            answers = _kill_and_kill_the_successor(cluster, messages)
        except grpc.RpcError as error:
            # The second kill came so late that the successor computed one of the streams by itself, which must end.
            assert "alone in the last one" in str(error.details())
        else:
            break
    for answer, expected in zip(answers, undisturbed, strict=True):
        answer.assert_equals(expected)
    ready_pids(cluster)


def _kill_and_kill_the_successor(cluster: Cluster, messages: list[gateway_pb2.GenerateRequest]) -> list[Collected]:
    before = ready_pids(cluster)

    def kill() -> None:
        os.kill(before[DENSE], signal.SIGKILL)
        until(lambda: pids(cluster)[DENSE] != before[DENSE], "the standby serves")
        os.kill(before[f"standby of {DENSE}"], signal.SIGKILL)

    return disturbed(cluster, messages, kill)


def test_a_replacement_with_the_same_config_uses_a_standby_with_weights(
    cluster: Cluster, messages: list[gateway_pb2.GenerateRequest], undisturbed: list[Collected]
) -> None:
    before = ready_pids(cluster)
    status = ctl(cluster, "status").stdout
    assert f"{DENSE} process {before[DENSE]}" in status
    for role in (DENSE, ATTENTION):
        assert f"standby of {role}: process {before[f'standby of {role}']} ready" in status
    has_weights = "weights loaded" in status
    result = ctl(cluster, "replace-dense")
    assert result.returncode == 0, result.stderr
    after = ready_pids(cluster)
    assert (after[DENSE] == before[f"standby of {DENSE}"]) == has_weights
    for answer, expected in zip(collect_all(cluster.gateway, messages), undisturbed, strict=True):
        answer.assert_equals(expected)


def test_only_the_first_dense_worker_has_loaded_the_weights(cluster: Cluster) -> None:
    killed = ready_pids(cluster)[DENSE]
    os.kill(killed, signal.SIGKILL)
    until(lambda: pids(cluster)[DENSE] != killed, "another one serves")
    ready_pids(cluster)
    log = cluster.log_file.read_text()
    assert log.count("weights found in memory") >= log.count("service=dense_worker event=loaded ") - 1 > 0
