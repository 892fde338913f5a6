"""Standbys take over from any process of two ranks: streams of every kind pause and get the tokens of one rank."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from services.pb import gateway_pb2
from tests.support.clients.streams import Collected, collect_all, messages_of_every_kind
from tests.support.cluster import Cluster, ctl, free_port, running_cluster
from tests.support.rank_processes import PROCESSES, STANDBYS, ready_pids
from tests.support.scrape import Scrape

pytestmark = pytest.mark.timeout(400)  # processes start several times, and the machine may be slow

PROMPT = "Count from 1 to 500, slowly, and tell of every number what you like about it. " * 3
MAX_TOKENS = 40
ARRANGEMENTS = {"tensor": "dense.tensor_parallel_size=2", "pipeline": "dense.pipeline_parallel_size=2"}
KILLED = [*((name,) for name in PROCESSES), PROCESSES]
# Each process in one arrangement: how a launcher finds out that one hangs does not depend on what the ranks share.
HANGING = [
    ("tensor", "dense_worker"),
    ("tensor", "attn_worker-1"),
    ("pipeline", "dense_worker-1"),
    ("pipeline", "attn_worker"),
]


@pytest.fixture(scope="module")
def metrics_address() -> str:
    return f"127.0.0.1:{free_port()}"


@pytest.fixture(scope="module", params=ARRANGEMENTS)
def ranks(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, metrics_address: str
) -> Iterator[Cluster]:
    settings = (ARRANGEMENTS[request.param], f"launch.metrics_address={metrics_address}", "watchdog.stall_timeout_s=5")
    with running_cluster(tmp_path_factory.mktemp("ranks"), *settings, *STANDBYS, is_warm=True) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def messages() -> list[gateway_pb2.GenerateRequest]:
    return messages_of_every_kind(PROMPT, MAX_TOKENS, stop="no such text")


@pytest.fixture(scope="module")
def of_one_rank(cluster: Cluster, messages: list[gateway_pb2.GenerateRequest]) -> list[Collected]:
    return collect_all(cluster.gateway, messages)


def num_take_overs(address: str) -> float:
    scrape = Scrape(address)
    return sum(scrape.value("twostroke_launch_take_overs_total", role=role) for role in ("dense_worker", "attn_worker"))


@pytest.mark.parametrize("names", KILLED, ids="+".join)
def test_the_standbys_of_killed_processes_serve_their_streams(
    ranks: Cluster,
    messages: list[gateway_pb2.GenerateRequest],
    of_one_rank: list[Collected],
    metrics_address: str,
    names: tuple[str, ...],
) -> None:
    before, count = ready_pids(ranks), num_take_overs(metrics_address)

    def kill() -> None:
        for name in names:
            os.kill(before[name], signal.SIGKILL)

    for collected, expected in zip(collect_all(ranks.gateway, messages, kill), of_one_rank, strict=True):
        collected.assert_equals(expected)
    after = ready_pids(ranks, [before[name] for name in names])
    changed = {name: after[name] for name in PROCESSES if after[name] != before[name]}
    assert changed == {name: before[f"standby of {name}"] for name in names}, "the processes that were ready serve now"
    assert num_take_overs(metrics_address) == count + len(names)
    ranks.wait_idle()


def test_a_shard_that_dies_with_its_standby_is_started_again(
    ranks: Cluster, messages: list[gateway_pb2.GenerateRequest], of_one_rank: list[Collected]
) -> None:
    before, shard = ready_pids(ranks), "dense_worker-1"
    killed = [before[name] for name in (f"standby of {shard}", shard)]

    def kill() -> None:
        for pid in killed:
            os.kill(pid, signal.SIGKILL)

    for collected, expected in zip(collect_all(ranks.gateway, messages, kill), of_one_rank, strict=True):
        collected.assert_equals(expected)
    after = ready_pids(ranks, killed)
    assert {name for name in PROCESSES if after[name] != before[name]} == {shard}
    assert not {after[shard], after[f"standby of {shard}"]} & {*before.values()}


@pytest.mark.parametrize(("ranks", "name"), HANGING, indirect=["ranks"], scope="module")
def test_the_standby_of_a_process_that_hangs_goes_on(
    ranks: Cluster, messages: list[gateway_pb2.GenerateRequest], of_one_rank: list[Collected], name: str
) -> None:
    before = ready_pids(ranks)
    disturbed = collect_all(ranks.gateway, messages, lambda: os.kill(before[name], signal.SIGSTOP))
    for collected, expected in zip(disturbed, of_one_rank, strict=True):
        collected.assert_equals(expected)
    after = ready_pids(ranks, [before[name]])
    assert after[name] == before[f"standby of {name}"]
    ranks.wait_idle()


def test_the_status_names_the_standby_of_each_rank(ranks: Cluster) -> None:
    pids = ready_pids(ranks)
    lines = ctl(ranks, "status").stdout.splitlines()
    for name in PROCESSES:
        kind = "weights loaded" if name.startswith("dense") else "modules imported"
        assert any(line.startswith(f"{name} process {pids[name]}, ") for line in lines), lines
        [line] = [line for line in lines if line.startswith(f"standby of {name}: ")]
        assert line.startswith(f"standby of {name}: process {pids[f'standby of {name}']} ready, {kind}, ")
