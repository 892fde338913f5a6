"""One gateway and two pairs of workers behind one name: both get load, and streams survive the death of a pair."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.pb import dense_pb2, dense_pb2_grpc, gateway_pb2_grpc
from tests.support.cluster import (
    REQUEST_TIMEOUT_S,
    STOP_TIMEOUT_S,
    assert_nothing_left,
    free_port,
    request,
    stale_regions,
)
from tests.support.models import TWO_LAYERS
from tests.support.warm_process import WarmProcess, warm_server

WAIT_S = 90.0
NUM_STREAMS = 6
NUM_TOKENS = 60
PROMPT = "San Francisco is a"
MAX_ROUNDS = 5
PATIENCE = [("grpc.max_reconnect_backoff_ms", 500)]  # the default grows to minutes while a pair is down


class Processes:
    """Running services, by name."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._running: dict[str, WarmProcess] = {}

    def start(self, name: str, module: str, *overrides: str) -> None:
        command = [sys.executable, "-m", module]
        for override in overrides:
            command += ["--set", override]
        with self.log_file(name).open("ab") as log:
            self._running[name] = WarmProcess(warm_server(), command, stderr=log.fileno())

    def signal(self, name: str, number: int) -> None:
        self._running[name].send_signal(number)

    def wait(self, name: str) -> int:
        return self._running[name].wait(STOP_TIMEOUT_S)

    def log_file(self, name: str) -> Path:
        return self._directory / f"{name}.log"

    def logs(self) -> str:
        return "\n".join(f"{name}:\n{self.log_file(name).read_text()[-3000:]}" for name in self._running)

    def kill(self) -> None:
        for process in self._running.values():
            process.kill()
            process.wait()


class Deployment:
    """Two pairs of workers at ports of their own, and a gateway that reaches both by one address."""

    def __init__(self, directory: Path) -> None:
        self.processes = Processes(directory)
        self._directory = directory
        self._ports = {pair: free_port() for pair in ("a", "b")}
        self._gateway_channel = grpc.insecure_channel(f"unix:{directory}/gateway.sock")
        self._channels = {
            pair: grpc.insecure_channel(f"127.0.0.1:{port}", options=PATIENCE) for pair, port in self._ports.items()
        }
        self.gateway = gateway_pb2_grpc.GatewayStub(self._gateway_channel)

    def start_pair(self, pair: str) -> None:
        addresses = (
            f"attention.address=unix:{self._directory}/attention-{pair}.sock",
            f"dense.address=127.0.0.1:{self._ports[pair]}",
            TWO_LAYERS,
            "attention.num_threads=1",
            "dense.num_threads=1",
        )
        for role in ("attn_worker", "dense_worker"):
            self.processes.start(f"{role}-{pair}", f"services.{role}", *addresses)

    def start_gateway(self) -> None:
        self.processes.start(
            "gateway",
            "tests.support.workers.rebalancing_gateway",
            TWO_LAYERS,
            f"gateway.address=unix:{self._directory}/gateway.sock",
            f"gateway.http_address=unix:{self._directory}/http.sock",
            "dense.address=ipv4:" + ",".join(f"127.0.0.1:{port}" for port in self._ports.values()),
            "gateway.num_dense_streams=2",
        )

    def wait_serving(self) -> None:
        """Waits until the gateway has found a dense worker."""
        health = health_pb2_grpc.HealthStub(self._gateway_channel)
        deadline = time.monotonic() + WAIT_S
        while True:
            answer = health.Check(health_pb2.HealthCheckRequest(), timeout=REQUEST_TIMEOUT_S, wait_for_ready=True)
            if answer.status == health_pb2.HealthCheckResponse.SERVING:
                return
            assert time.monotonic() < deadline, self.processes.logs()
            time.sleep(0.1)

    def kill_pair(self, pair: str) -> None:
        for role in ("dense_worker", "attn_worker"):
            self.processes.signal(f"{role}-{pair}", signal.SIGKILL)
            self.processes.wait(f"{role}-{pair}")

    def status(self, pair: str) -> dense_pb2.DenseStatus:
        stub = dense_pb2_grpc.DenseWorkerStub(self._channels[pair])
        return stub.GetStatus(dense_pb2.GetStatusRequest(), timeout=REQUEST_TIMEOUT_S, wait_for_ready=True)

    def answer(
        self, seed: int, on_token: Callable[[], None] = lambda: None, num_tokens: int = NUM_TOKENS
    ) -> list[int]:
        """A sampled answer, which depends on `seed` alone."""
        token_ids: list[int] = []
        sampled = request(PROMPT, num_tokens, temperature=1.0, seed=seed, ignore_eos=True)
        for chunk in self.gateway.GenerateStream(sampled, timeout=REQUEST_TIMEOUT_S, wait_for_ready=True):
            token_ids += chunk.token_ids
            on_token()
        return token_ids

    def num_moved(self) -> int:
        """How many sequences the gateway has moved to another pair, according to its log."""
        log = self.processes.log_file("gateway").read_text()
        return sum(int(word.removeprefix("num_moved=")) for word in log.split() if word.startswith("num_moved="))

    def wait_load_on_both(self) -> None:
        """Waits until requests reach both pairs: the gateway has found both."""
        deadline = time.monotonic() + WAIT_S
        with ThreadPoolExecutor(NUM_STREAMS) as threads:
            while True:
                before = {pair: self.status(pair).num_steps for pair in self._ports}
                list(threads.map(lambda seed: self.answer(seed, num_tokens=8), range(NUM_STREAMS)))
                if all(self.status(pair).num_steps > num_steps for pair, num_steps in before.items()):
                    return
                assert time.monotonic() < deadline, self.processes.logs()
                time.sleep(0.2)

    def close(self) -> None:
        for channel in (self._gateway_channel, *self._channels.values()):
            channel.close()


@contextlib.contextmanager
def deployment(directory: Path) -> Iterator[Deployment]:
    running = Deployment(directory)
    try:
        for pair in ("a", "b"):
            running.start_pair(pair)
        running.start_gateway()
        running.wait_serving()
        yield running
    finally:
        running.close()
        running.processes.kill()


@pytest.mark.timeout(300)  # two pairs start twice, on machines that may be busy
def test_streams_of_a_dead_pair_go_on_with_the_other_and_the_pair_is_found_again(tmp_path: Path) -> None:
    regions = stale_regions()
    with deployment(tmp_path) as running, ThreadPoolExecutor(NUM_STREAMS) as threads:
        seeds = range(NUM_STREAMS)
        expected = list(threads.map(running.answer, seeds))
        assert len({tuple(token_ids) for token_ids in expected}) == NUM_STREAMS, "every seed gives another answer"
        running.wait_load_on_both()

        for _ in range(MAX_ROUNDS):  # on a busy machine all streams of a pair may end before the signal comes
            tokens = threading.Semaphore(0)
            streams = [threads.submit(running.answer, seed, tokens.release) for seed in seeds]
            for _ in range(2 * NUM_STREAMS):
                assert tokens.acquire(timeout=REQUEST_TIMEOUT_S)
            running.kill_pair("a")
            assert [stream.result(REQUEST_TIMEOUT_S) for stream in streams] == expected, "a token differs"
            assert list(threads.map(running.answer, seeds)) == expected, "the other pair runs all new requests"
            if running.num_moved():
                break
            running.start_pair("a")
            running.wait_load_on_both()
        assert running.num_moved(), running.processes.logs()

        running.start_pair("a")
        running.wait_load_on_both()
        for name in ("gateway", "dense_worker-a", "dense_worker-b", "attn_worker-a", "attn_worker-b"):
            running.processes.signal(name, signal.SIGTERM)
            assert running.processes.wait(name) == 0, running.processes.logs()
    logs = "".join(file.read_text() for file in tmp_path.glob("*.log"))
    assert_nothing_left(regions, logs)  # the restarted pair removes what the killed one left
