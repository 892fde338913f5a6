"""Two ranks give the tokens of one, also when any of their processes dies under streams of every kind.

Both have parts of all layers, or each has some of the layers: then they work one at a time, or, with lanes, at once.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.common.config import EMBEDDED_MODEL
from services.pb import gateway_pb2
from tests.support.clients.streams import Collected, collect, collect_all, messages_of_every_kind
from tests.support.cluster import Cluster, running_cluster
from tests.support.cluster import request as request_of
from tests.support.rank_processes import PROCESSES, pid_of

pytestmark = pytest.mark.timeout(400)  # processes start and stop several times, and the machine may be slow

PROMPT = "Count from 1 to 500, slowly, and tell of every number what you like about it. " * 3
MAX_TOKENS = 40
KILLED = ("dense_worker-1", "attn_worker")  # in the short run; `make chaos` kills each
TENSORS, STAGES = ("dense.tensor_parallel_size=2",), ("dense.pipeline_parallel_size=2",)
LANES = (*STAGES, "scheduler.num_lanes=2")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    is_long = metafunc.config.getoption("--all-families")
    if "ranks" in metafunc.fixturenames:
        kills = "name" in metafunc.fixturenames
        arrangements = [TENSORS, STAGES, LANES] if is_long or not kills else [TENSORS, LANES]
        metafunc.parametrize("ranks", arrangements, ids="-".join, indirect=True, scope="module")
    if "arrangement" in metafunc.fixturenames:
        metafunc.parametrize("arrangement", [TENSORS, STAGES, LANES], ids="-".join)
    if "name" in metafunc.fixturenames:
        metafunc.parametrize("name", PROCESSES if is_long else KILLED)
    if "stopped" in metafunc.fixturenames:
        metafunc.parametrize("stopped", PROCESSES if is_long else ())


@pytest.fixture(scope="module")
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running_cluster(tmp_path_factory.mktemp("ranks"), *request.param, is_warm=True) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def messages(cluster: Cluster) -> list[gateway_pb2.GenerateRequest]:
    text = collect(cluster.gateway, request_of(PROMPT, MAX_TOKENS, ignore_eos=True)).text[0]
    return messages_of_every_kind(PROMPT, MAX_TOKENS, stop=text[-12:])


@pytest.fixture(scope="module")
def of_one_rank(cluster: Cluster, messages: list[gateway_pb2.GenerateRequest]) -> list[Collected]:
    return collect_all(cluster.gateway, messages)


def test_streams_are_those_of_one_rank(
    ranks: Cluster, messages: list[gateway_pb2.GenerateRequest], of_one_rank: list[Collected]
) -> None:
    for collected, expected in zip(collect_all(ranks.gateway, messages), of_one_rank, strict=True):
        collected.assert_equals(expected)
    ranks.wait_idle()


def test_streams_end_as_without_the_kill(
    ranks: Cluster, messages: list[gateway_pb2.GenerateRequest], of_one_rank: list[Collected], name: str
) -> None:
    pids = {each: pid_of(ranks, each) for each in PROCESSES}
    disturbed = collect_all(ranks.gateway, messages, lambda: os.kill(pids[name], signal.SIGKILL))
    for collected, expected in zip(disturbed, of_one_rank, strict=True):
        collected.assert_equals(expected)
    changed = {each for each in PROCESSES if pid_of(ranks, each) != pids[each]}
    assert changed == {name}, f"{changed}: the other processes live on"
    ranks.wait_idle()


def test_a_rank_that_hangs_is_found(
    tmp_path: Path,
    messages: list[gateway_pb2.GenerateRequest],
    of_one_rank: list[Collected],
    arrangement: tuple[str, ...],
    stopped: str,
) -> None:
    """With drafts of a model of the first rank's own, which all ranks verify, unless there are lanes."""
    drafts = "scheduler.speculation=draft_model", f"scheduler.draft_model={EMBEDDED_MODEL}"
    settings = *arrangement, "watchdog.stall_timeout_s=5", *(() if arrangement is LANES else drafts)
    with running_cluster(tmp_path, *settings, is_warm=True) as cluster:
        pid = pid_of(cluster, stopped)
        disturbed = collect_all(cluster.gateway, messages, lambda: os.kill(pid, signal.SIGSTOP))
        for collected, expected in zip(disturbed, of_one_rank, strict=True):
            collected.assert_equals(expected)
        assert pid_of(cluster, stopped) != pid
        cluster.wait_idle()


def test_a_rank_whose_device_hangs_is_found(
    tmp_path: Path,
    messages: list[gateway_pb2.GenerateRequest],
    of_one_rank: list[Collected],
    arrangement: tuple[str, ...],
) -> None:
    """Its process answers, and nobody can tell it from those that wait for it: all dense workers start again."""
    hang = tmp_path / "hang"
    modules = {"services.dense_worker.ranks": "tests.support.workers.hanging_rank"}
    settings = *arrangement, "watchdog.stall_timeout_s=5"
    environment = os.environ | {"HANG_FILE": str(hang)}
    with running_cluster(tmp_path, *settings, is_warm=True, modules=modules, env=environment) as cluster:
        pids = {each: pid_of(cluster, each) for each in PROCESSES}
        disturbed = collect_all(cluster.gateway, messages, hang.touch)
        for collected, expected in zip(disturbed, of_one_rank, strict=True):
            collected.assert_equals(expected)
        assert not hang.exists(), "no step has hung"
        changed = {each for each in PROCESSES if pid_of(cluster, each) != pids[each]}
        assert changed == {"dense_worker", "dense_worker-1"}, "the caches of all ranks are kept"
        cluster.wait_idle()
