"""Services without progress report role, layer, step and request, and are restarted."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.launch.health_watch import HealthWatch
from services.pb import stall_pb2
from services.rpc.server import LIVENESS
from tests.support.clients.streams import Collected, collect, collect_all
from tests.support.cluster import Cluster, request, running_cluster
from tests.support.models import TWO_LAYERS
from tests.support.plain_services import PlainServices, plain_services
from tests.support.rank_processes import pid_of
from tests.support.workers.deaf_dense_worker import LOST
from tests.support.workers.slow_dense_worker import LAYER_S

pytestmark = pytest.mark.timeout(400)  # processes start and stop several times, and the machine may be slow

STALL_TIMEOUT_S = 3.0
NUM_LAYERS = 4  # of the embedded model
DEADLINE_S = 150.0
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    directory = tmp_path_factory.mktemp("stalls")
    timeouts = [f"watchdog.{key}={STALL_TIMEOUT_S}" for key in ("stall_timeout_s", "gateway_timeout_s")]
    with running_cluster(directory, TWO_LAYERS, *timeouts, is_warm=True) as cluster:
        yield cluster


@pytest.mark.parametrize("role", ["attn_worker", "dense_worker"])
def test_a_stopped_worker_is_restarted_and_no_stream_notices(cluster: Cluster, role: str) -> None:
    messages = [request("Count", 100, temperature=0.9, seed=seed, ignore_eos=True) for seed in range(4)]
    undisturbed = collect_all(cluster.gateway, messages)
    pid, start = cluster.pid_of(role), len(cluster.log_file.read_text())
    disturbed = collect_all(cluster.gateway, messages, lambda: os.kill(pid, signal.SIGSTOP))
    for collected, expected in zip(disturbed, undisturbed, strict=True):
        collected.assert_equals(expected)
    wait_until(lambda: cluster.pid_of(role) != pid)  # also if the streams had just ended when it was stopped
    log = cluster.log_file.read_text()[start:].splitlines()
    assert any("makes no progress" in line and f"role={role}" in line and "no answer" in line for line in log), log
    cluster.wait_idle()


def test_a_worker_that_hangs_as_soon_as_the_server_serves_is_restarted(tmp_path: Path) -> None:
    """Most often before its first health check, which comes a fifth of the bound after the start."""
    message = request("Count", 20, ignore_eos=True)
    with running_cluster(tmp_path, TWO_LAYERS, "watchdog.stall_timeout_s=12", is_warm=True) as cluster:
        pid = pid_of(cluster, "attn_worker")
        os.kill(pid, signal.SIGSTOP)
        disturbed = collect(cluster.gateway, message)
        assert pid_of(cluster, "attn_worker") != pid
        disturbed.assert_equals(collect(cluster.gateway, message))
        cluster.wait_idle()


def test_a_stopped_gateway_is_restarted(cluster: Cluster) -> None:
    expected = cluster.generate("Count", 20, ignore_eos=True).token_ids
    pid = cluster.pid_of("gateway")
    os.kill(pid, signal.SIGSTOP)

    def serves_again() -> bool:
        try:
            return cluster.pid_of("gateway") != pid and bool(cluster.generate("Count", 1))
        except (AssertionError, OSError, grpc.RpcError):
            return False  # the old gateway has ended, and the new one does not serve yet

    wait_until(serves_again)
    assert cluster.generate("Count", 20, ignore_eos=True).token_ids == expected


def test_all_services_report_a_lost_signal_and_the_dense_worker_is_restarted(tmp_path: Path) -> None:
    stall_timeout_s = 2.0
    settings = (f"watchdog.stall_timeout_s={stall_timeout_s}",)
    deaf = {"dense_worker": "tests.support.workers.deaf_dense_worker"}
    with plain_services(tmp_path, *settings, modules=deaf) as services:
        lucky = collect(services.gateway, request("Count", 20, temperature=0.9, seed=5, ignore_eos=True))
        answers: list[Collected] = []
        message = request("Count", 20, temperature=0.9, seed=5, ignore_eos=True, request_id="unlucky")
        thread = threading.Thread(target=lambda: answers.append(collect(services.gateway, message)))
        thread.start()
        wait_until(lambda: services.dense_status().HasField("stall") and services.attention_status().HasField("stall"))
        dense, attention = services.dense_status().stall, services.attention_status().stall
        check(dense, "dense_worker", "attn_worker")
        check(attention, "attn_worker", "dense_worker")
        assert (dense.step_id, dense.layer) == (attention.step_id, attention.layer)
        for name in ("dense_worker", "attn_worker"):
            [stacks] = [line for line in services.log(name).splitlines() if "stacks of all threads" in line]
            assert " in wait" in stacks, "what its engine thread does"
        wait_until(lambda: health(tmp_path, "gateway") == NOT_SERVING)
        assert "unlucky" in next(line for line in services.log("gateway").splitlines() if "event=stalled" in line)
        for name in ("dense", "attention"):
            assert health(tmp_path, name) == NOT_SERVING
            assert health(tmp_path, name, LIVENESS) == SERVING, "a worker that waits must not be restarted"

        children = [WatchedService(services, role, tmp_path) for role in services.num_starts]
        asyncio.run(watch_until(HealthWatch(lambda: children, stall_timeout_s, 100.0), lambda: not thread.is_alive()))
        answers[0].assert_equals(lucky)
        services.wait_idle()
        wait_until(lambda: all(health(tmp_path, name) == SERVING for name in ("gateway", "dense", "attention")))
        [reason] = [reason for child in children for reason in child.reasons]
        assert "unlucky" in reason and "layer" in reason
        assert services.num_starts == {"attn_worker": 1, "dense_worker": 2, "gateway": 1}


class WatchedService:
    """A service of `PlainServices` with the interface of the launcher's `Child`."""

    is_running = True

    def __init__(self, services: PlainServices, role: str, directory: Path) -> None:
        self._services = services
        self.role = role
        names = {"dense_worker": "dense", "attn_worker": "attention", "gateway": "gateway"}
        self.address = f"unix:{directory}/{names[role]}.sock"
        self.reasons: list[str] = []

    @property
    def pid(self) -> int:
        return self._services.pid_of(self.role)

    def open_channel(self) -> grpc.aio.Channel:
        return grpc.aio.insecure_channel(self.address)

    async def kill_hanging(self, reason: str) -> None:
        self.reasons.append(reason)
        os.kill(self.pid, signal.SIGKILL)


async def watch_until(watch: HealthWatch, is_over: Callable[[], bool]) -> None:
    task = asyncio.create_task(watch.run())
    async with asyncio.timeout(DEADLINE_S):
        while not is_over():
            assert not task.done(), "nobody watches any more"
            await asyncio.sleep(0.05)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def test_slow_steps_are_not_reported_as_a_stall(tmp_path: Path) -> None:
    """A step takes longer than the limit, but a layer does not. The gateway receives nothing during the step."""
    stall_timeout_s = (NUM_LAYERS - 0.5) * LAYER_S
    settings = (f"watchdog.stall_timeout_s={stall_timeout_s}",)
    slow = {"dense_worker": "tests.support.workers.slow_dense_worker"}
    with plain_services(tmp_path, *settings, modules=slow) as services:
        assert len(services.generate("Count", 1).token_ids) == 1
        for role in services.num_starts:
            assert "event=stalled" not in services.log(role)


def check(stall: stall_pb2.Stall, role: str, waits_for: str) -> None:
    assert (stall.role, stall.waits_for, list(stall.request_ids)) == (role, waits_for, ["unlucky"])
    assert stall.layer == (LOST - 1) % NUM_LAYERS
    assert stall.stalled_s >= 2.0


def health(directory: Path, name: str, service: str = "") -> int:
    with grpc.insecure_channel(f"unix:{directory}/{name}.sock") as channel:
        check = health_pb2_grpc.HealthStub(channel).Check
        return check(health_pb2.HealthCheckRequest(service=service), timeout=DEADLINE_S).status


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)
