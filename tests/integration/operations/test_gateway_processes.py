"""Two gateway processes at the same ports: both serve, Abort finds its request, and one survives the other's death."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from services.pb import gateway_pb2, gateway_pb2_grpc
from tests.support.clients.streams import collect
from tests.support.cluster import Cluster, children_of, free_port, request, reserve_port, running_cluster
from tests.support.models import TWO_LAYERS
from tests.support.scrape import Scrape

PROMPT = "San Francisco is a"
MAX_CONNECTIONS = 64
WAIT_S = 60.0

pytestmark = pytest.mark.timeout(400)  # processes start and stop several times, and the machine may be slow


def free_metrics_ports() -> int:
    """The first of two free ports with the distance that the metrics of two gateways have."""
    while not reserve_port((port := free_port()) + 10):
        pass
    return port


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with two_gateways(tmp_path) as cluster:
        yield cluster


@contextlib.contextmanager
def two_gateways(directory: Path, **settings: str) -> Iterator[Cluster]:
    overrides = {
        "gateway.address": f"127.0.0.1:{free_port()}",
        "gateway.http_address": f"127.0.0.1:{free_port()}",
        "gateway.metrics_address": f"127.0.0.1:{free_metrics_ports()}",
        "launch.gateway_processes": "2",
    }
    values = [TWO_LAYERS, *(f"{key}={value}" for key, value in (overrides | settings).items())]
    with running_cluster(directory, *values, is_warm=True) as cluster:
        yield cluster


class Gateway:
    """A client of one gateway process, at that process's own socket."""

    def __init__(self, cluster: Cluster, index: int) -> None:
        found = re.search(r"event=control address=unix:(\S+)/launch.sock", cluster.log_file.read_text())
        assert found is not None
        self.file = f"gateway-{index}.toml"
        self._cluster = cluster
        self._channel = grpc.insecure_channel(f"unix:{found[1]}/gateway-{index}.sock")
        self.stub = gateway_pb2_grpc.GatewayStub(self._channel)
        [line] = re.findall(r"^metrics_address.*$", _section(Path(found[1]) / self.file, "gateway"), re.M)
        self.metrics_address = line.partition(" = ")[2].strip('"')

    @property
    def pid(self) -> int | None:
        for pid in children_of(self._cluster.process.pid):
            with contextlib.suppress(OSError):  # it has just ended
                if self.file in Path(f"/proc/{pid}/cmdline").read_text():
                    return pid
        return None

    def num_answers(self) -> float:
        return Scrape(self.metrics_address).value("twostroke_gateway_answers_total")

    def close(self) -> None:
        self._channel.close()


def _section(file: Path, name: str) -> str:
    return file.read_text().partition(f"[{name}]")[2].partition("\n[")[0]


@pytest.fixture
def gateways(cluster: Cluster) -> Iterator[list[Gateway]]:
    gateways = [Gateway(cluster, index) for index in range(2)]
    yield gateways
    for gateway in gateways:
        gateway.close()


def over_grpc(cluster: Cluster) -> list[int]:
    with grpc.insecure_channel(cluster.address, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
        return collect(gateway_pb2_grpc.GatewayStub(channel), request(PROMPT, 8)).token_ids[0]


def over_http(cluster: Cluster) -> str:
    body = f'{{"prompt": "{PROMPT}", "max_tokens": 8, "temperature": 0}}'.encode()
    call = urllib.request.Request(
        f"http://{cluster.http_address}/v1/completions", body, {"content-type": "application/json"}
    )
    with urllib.request.urlopen(call, timeout=WAIT_S) as response:
        return response.read().decode().partition('"text":')[2].partition(",")[0]


def until(is_done: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while not is_done():
        assert time.monotonic() < deadline, f"not within {WAIT_S} s: {what}"
        time.sleep(0.05)


def test_two_gateways_serve_at_the_same_ports(cluster: Cluster, gateways: list[Gateway]) -> None:
    def served(before: list[float]) -> list[float]:
        return [gateway.num_answers() - count for gateway, count in zip(gateways, before, strict=True)]

    for ask in (over_grpc, over_http):
        before = [gateway.num_answers() for gateway in gateways]
        answers = []
        for _ in range(MAX_CONNECTIONS):
            answers.append(ask(cluster))
            until(lambda before=before, answers=answers: sum(served(before)) == len(answers), "each answer is counted")
            if all(served(before)):
                break
        assert all(served(before)), f"one process got all of {MAX_CONNECTIONS} connections"
        assert all(answer == answers[0] for answer in answers), "the answers differ"

    # A scrape of either process has what both count, and once what the workers measure.
    scraped = Scrape(cluster.http_address)
    assert scraped.value("twostroke_gateway_answers_total") == sum(gateway.num_answers() for gateway in gateways)
    assert [len(each.samples) for each in scraped.families if each.name == "vllm:num_requests_running"] == [1]

    # An Abort is sent to the other process.
    first, second = gateways
    endless = {"n": 8, "temperature": 1.0, "ignore_eos": True}  # long enough to run still on a busy machine
    message, has_begun = request(PROMPT, 1500, request_id="long", **endless), threading.Event()
    with ThreadPoolExecutor(1) as threads:
        stream = threads.submit(collect, first.stub, message, has_begun.set)
        assert has_begun.wait(WAIT_S)
        assert second.stub.Abort(gateway_pb2.AbortRequest(request_id="long")).was_running
        assert stream.result().reasons[0][0] == gateway_pb2.FINISH_REASON_ABORT
    assert not second.stub.Abort(gateway_pb2.AbortRequest(request_id="long")).was_running

    # One of them dies.
    message = request(PROMPT, 80, temperature=0.9, seed=5, ignore_eos=True)
    undisturbed = collect(second.stub, message)
    pid, other_pid = first.pid, second.pid
    assert pid is not None
    with ThreadPoolExecutor(8) as threads:
        begun = [threading.Event() for _ in range(8)]
        long_message = request(PROMPT, 1500, **endless)
        broken = [threads.submit(collect, first.stub, long_message, event.set) for event in begun[:4]]
        whole = [threads.submit(collect, second.stub, message, event.set) for event in begun[4:]]
        assert all(event.wait(WAIT_S) for event in begun)
        os.kill(pid, signal.SIGKILL)
        for stream in broken:
            error = stream.exception()
            assert isinstance(error, grpc.RpcError) and error.code() is grpc.StatusCode.UNAVAILABLE
        for stream in whole:
            stream.result().assert_equals(undisturbed)
    cluster.wait_idle(WAIT_S)  # the workers have dropped the dead gateway's sequences
    assert cluster.dense_status().num_running == 0
    until(lambda: first.pid not in (None, pid), "the killed gateway is started again")
    assert second.pid == other_pid
    first_again = request(PROMPT, 80, temperature=0.9, seed=5, ignore_eos=True)
    first_again.request_id = "again"

    def serves_again() -> bool:
        try:
            collect(first.stub, first_again).assert_equals(undisturbed)
        except grpc.RpcError as error:
            assert error.code() is grpc.StatusCode.UNAVAILABLE
            return False
        return True

    until(serves_again, "the killed gateway serves again")

    # The cluster is asked to stop: both processes let their streams end.
    with ThreadPoolExecutor(2) as threads:
        begun = [threading.Event(), threading.Event()]
        streams = [
            threads.submit(collect, gateway.stub, message, event.set)
            for gateway, event in zip(gateways, begun, strict=True)
        ]
        assert all(event.wait(WAIT_S) for event in begun)
        cluster.process.send_signal(signal.SIGTERM)
        for stream in streams:
            stream.result().assert_equals(undisturbed)
    assert cluster.process.wait(WAIT_S) == 0


KEYS = """
[[keys]]
name = "team"
key = "one-answer-at-a-time"
max_concurrent_answers = 1
"""
WITH_KEY = (("authorization", "Bearer one-answer-at-a-time"),)


@pytest.fixture
def keys_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("keys") / "keys.toml"
    file.write_text(KEYS)
    return file


def test_a_limit_holds_for_both_together_and_what_a_dead_one_had_is_over(tmp_path: Path, keys_file: Path) -> None:
    settings = {"gateway.api_keys_file": str(keys_file)}
    with two_gateways(tmp_path, **settings) as cluster, contextlib.ExitStack() as stack:
        first, second = [Gateway(cluster, index) for index in range(2)]
        for gateway in (first, second):
            stack.callback(gateway.close)
        endless = request(PROMPT, 1500, temperature=1.0, ignore_eos=True)
        stream = first.stub.GenerateStream(endless, metadata=WITH_KEY)
        next(stream)
        short = request(PROMPT, 2)

        def ask() -> grpc.StatusCode | None:
            try:
                second.stub.Generate(short, metadata=WITH_KEY, timeout=WAIT_S)
            except grpc.RpcError as error:
                return error.code()
            return None

        assert ask() is grpc.StatusCode.RESOURCE_EXHAUSTED, "the other process runs an answer of this key"
        pid = first.pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(grpc.RpcError):
            list(stream)
        until(lambda: ask() is None, "the answer of the dead process is over")
