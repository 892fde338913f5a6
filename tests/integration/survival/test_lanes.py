"""Two lanes give the tokens of one, also when either worker dies or hangs under streams."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from services.pb import gateway_pb2, sampling_pb2
from tests.support.clients.streams import Collected, collect, collect_all, messages_of_every_kind
from tests.support.cluster import REQUEST_TIMEOUT_S, START_TIMEOUT_S, Cluster, request, running_cluster
from tests.support.rank_processes import pid_of

pytestmark = pytest.mark.timeout(400)  # processes start and stop several times, and the machine may be slow

PROMPT = "Count from 1 to 500, slowly, and tell of every number what you like about it. " * 3
MAX_TOKENS = 40
WORKERS = ("dense_worker", "attn_worker")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "stopped" in metafunc.fixturenames:
        metafunc.parametrize("stopped", WORKERS if metafunc.config.getoption("--all-families") else ())


@pytest.fixture(scope="module")
def lanes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    settings = "scheduler.num_lanes=2", "model.runner=pooling"
    with running_cluster(tmp_path_factory.mktemp("lanes"), *settings, is_warm=True) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def messages(cluster: Cluster) -> list[gateway_pb2.GenerateRequest]:
    text = collect(cluster.gateway, request(PROMPT, MAX_TOKENS, ignore_eos=True)).text[0]
    return messages_of_every_kind(PROMPT, MAX_TOKENS, stop=text[-12:])


@pytest.fixture(scope="module")
def of_one_lane(cluster: Cluster, messages: list[gateway_pb2.GenerateRequest]) -> list[Collected]:
    return collect_all(cluster.gateway, messages)


def test_streams_are_those_of_one_lane(
    lanes: Cluster, messages: list[gateway_pb2.GenerateRequest], of_one_lane: list[Collected]
) -> None:
    for collected, expected in zip(collect_all(lanes.gateway, messages), of_one_lane, strict=True):
        collected.assert_equals(expected)
    lanes.wait_idle()


def test_searches_forms_and_vectors_are_those_of_one_lane(lanes: Cluster, cluster: Cluster) -> None:
    search, form = sampling_pb2.BeamSearch(length_penalty=1.0), sampling_pb2.StructuredOutput(regex="[a-f]{30}[0-9]{9}")
    messages = [
        request("San Francisco is a", 12, best_of=3, n=3, beam_search=search),
        request("A city is", 12, best_of=4, n=2, beam_search=search),
        request("Name: ", 50, structured_output=form),
        request("Number: ", 50, temperature=0.9, seed=3, structured_output=form),
        request(PROMPT, 30, ignore_eos=True),
    ]
    inputs = [gateway_pb2.EmbedInput(text=PROMPT[:length]) for length in range(20, 100, 10)]
    vectors = gateway_pb2.EmbedRequest(inputs=inputs)

    def results(of: Cluster) -> tuple[list[Collected], list[list[float]]]:
        with ThreadPoolExecutor(1) as threads:  # beside the streams
            found = threads.submit(of.gateway.Embed, vectors, timeout=REQUEST_TIMEOUT_S)
            return collect_all(of.gateway, messages), [list(each.values) for each in found.result().vectors]

    (streams, found), (expected_streams, expected) = results(lanes), results(cluster)
    for collected, of_one_lane in zip(streams, expected_streams, strict=True):
        collected.assert_equals(of_one_lane)
    assert len(expected) == len(inputs)
    for vector, expected_vector in zip(found, expected, strict=True):
        assert vector == pytest.approx(expected_vector, abs=1e-4)
    lanes.wait_idle()


@pytest.mark.parametrize("name", WORKERS)
def test_streams_end_as_without_the_kill(
    lanes: Cluster, messages: list[gateway_pb2.GenerateRequest], of_one_lane: list[Collected], name: str
) -> None:
    pids = {each: pid_of(lanes, each) for each in WORKERS}
    disturbed = collect_all(lanes.gateway, messages, lambda: os.kill(pids[name], signal.SIGKILL))
    for collected, expected in zip(disturbed, of_one_lane, strict=True):
        collected.assert_equals(expected)
    assert {each for each in WORKERS if pid_of(lanes, each) != pids[each]} == {name}
    lanes.wait_idle()


def test_sequences_of_a_killed_gateway_are_closed_in_both_lanes(
    lanes: Cluster, messages: list[gateway_pb2.GenerateRequest], of_one_lane: list[Collected]
) -> None:
    long = [request(PROMPT, 400, ignore_eos=True) for _ in range(4)]
    streams = [lanes.gateway.GenerateStream(message, wait_for_ready=True) for message in long]
    for stream in streams:
        next(stream)
    os.kill(pid_of(lanes, "gateway"), signal.SIGKILL)
    with pytest.raises(grpc.RpcError):
        list(streams[0])
    lanes.wait_idle()
    deadline = time.monotonic() + START_TIMEOUT_S
    while True:
        try:
            collect(lanes.gateway, messages[0]).assert_equals(of_one_lane[0])
            break
        except grpc.RpcError as error:  # the next gateway is not there yet, or not connected
            assert error.code() is grpc.StatusCode.UNAVAILABLE and time.monotonic() < deadline
            time.sleep(0.1)


def test_a_worker_that_hangs_is_found(
    tmp_path: Path, messages: list[gateway_pb2.GenerateRequest], of_one_lane: list[Collected], stopped: str
) -> None:
    settings = "scheduler.num_lanes=2", "watchdog.stall_timeout_s=5"
    with running_cluster(tmp_path, *settings, is_warm=True) as cluster:
        pid = pid_of(cluster, stopped)
        disturbed = collect_all(cluster.gateway, messages, lambda: os.kill(pid, signal.SIGSTOP))
        for collected, expected in zip(disturbed, of_one_lane, strict=True):
            collected.assert_equals(expected)
        assert pid_of(cluster, stopped) != pid
        cluster.wait_idle()
