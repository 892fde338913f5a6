"""Workers on one GPU and on two are killed and replaced under streams: the tokens are the same, nothing else dies."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from services.pb import dense_pb2
from tests.gpu.gpu_cluster import DEVICE, WORKERS, assert_mps_clients, gpu_cluster
from tests.support.clients.streams import Collected, collect, collect_all
from tests.support.cluster import Cluster, ctl, free_port, is_alive, request
from tests.support.reference import random_prompts, reference_tokens
from tests.support.scrape import Scrape

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(400)]

# The model runs in float32, where another batch size changes logits by about 1e-6. The probability that this changes
# one of the tokens below is less than one percent.
PROMPTS = random_prompts(4, longest=150, seed=6)[1:]
NUM_TOKENS = 500
LONG_NUM_TOKENS = 1500  # long, so that a stream is open nearly all the time
MESSAGES = [
    request(PROMPTS[0], NUM_TOKENS, ignore_eos=True),
    request(PROMPTS[1], NUM_TOKENS, temperature=0.9, seed=7, ignore_eos=True),
    request(PROMPTS[2], NUM_TOKENS, temperature=0.8, seed=8, top_p=0.9, repetition_penalty=1.2, ignore_eos=True),
]


def settings(path: Path, metrics_address: str) -> Sequence[str]:
    return (
        f"model.path={path}",
        "model.dtype=float32",
        f"gateway.metrics_address={metrics_address}",
        "scheduler.max_num_batched_tokens=96",
        "scheduler.max_num_seqs=4",
        "attention.num_blocks=200",
    )


@pytest.fixture(scope="module")
def metrics_address() -> str:
    return f"127.0.0.1:{free_port()}"


@pytest.fixture(scope="module")
def cluster(llama_path: Path, metrics_address: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with gpu_cluster(tmp_path_factory.mktemp("cluster"), *settings(llama_path, metrics_address)) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def undisturbed(cluster: Cluster) -> list[Collected]:
    return collect_all(cluster.gateway, MESSAGES)


def num_recovered(metrics_address: str) -> float:
    return Scrape(metrics_address).value("twostroke_gateway_recovered_sequences_total")


def check_kill(cluster: Cluster, metrics_address: str, role: str, undisturbed: list[Collected]) -> None:
    """Kills the worker in the middle of all streams, and checks that only this worker is restarted."""
    pids, recovered = {each: cluster.pid_of(each) for each in WORKERS}, num_recovered(metrics_address)
    disturbed = collect_all(cluster.gateway, MESSAGES, lambda: os.kill(pids[role], signal.SIGKILL))
    for collected, expected in zip(disturbed, undisturbed, strict=True):
        collected.assert_equals(expected)
    assert num_recovered(metrics_address) > recovered, "no stream was open at the kill"
    for each in WORKERS:
        assert (cluster.pid_of(each) != pids[each]) == (each == role)
    cluster.wait_idle()


def test_undisturbed_greedy_tokens_equal_hugging_face(llama_path: Path, undisturbed: list[Collected]) -> None:
    assert undisturbed[0].token_ids[0] == reference_tokens(llama_path, PROMPTS[0], NUM_TOKENS, DEVICE)


@pytest.mark.parametrize("role", WORKERS)
def test_streams_end_as_without_the_kill_and_the_other_worker_lives(
    cluster: Cluster, metrics_address: str, undisturbed: list[Collected], role: str
) -> None:
    check_kill(cluster, metrics_address, role, undisturbed)
    assert_mps_clients(cluster)


def test_a_stream_ends_as_without_the_replacement(cluster: Cluster, metrics_address: str) -> None:
    message = request(PROMPTS[0], LONG_NUM_TOKENS, ignore_eos=True)
    expected = collect(cluster.gateway, message)
    old_pid, recovered = cluster.pid_of("dense_worker"), num_recovered(metrics_address)
    is_over = threading.Event()

    def repeat() -> list[Collected]:
        answers = []
        while not is_over.is_set():
            answers.append(collect(cluster.gateway, message))
        return answers

    with ThreadPoolExecutor(1) as threads:
        answers = threads.submit(repeat)
        try:
            result = ctl(cluster, "replace-dense")
        finally:
            is_over.set()
    assert result.returncode == 0, result.stderr
    assert cluster.pid_of("dense_worker") != old_pid and not is_alive(old_pid)
    assert num_recovered(metrics_address) > recovered, "no stream was open at the replacement"
    for answer in answers.result():
        answer.assert_equals(expected)
    assert_mps_clients(cluster)
    assert "is_crash=True" not in cluster.log_file.read_text().rpartition("replacing the dense worker")[2]


def test_one_worker_on_each_of_two_gpus(llama_path: Path, tmp_path: Path) -> None:
    """Checks the tokens, then kills each worker once."""
    if torch.cuda.device_count() < 2:
        pytest.skip(f"needs 2 GPUs, there is {torch.cuda.device_count()}")
    metrics_address = f"127.0.0.1:{free_port()}"
    devices = ("dense.device=cuda:0", "attention.device=cuda:1")
    with gpu_cluster(tmp_path, *settings(llama_path, metrics_address), *devices) as cluster:
        undisturbed = collect_all(cluster.gateway, MESSAGES)
        assert undisturbed[0].token_ids[0] == reference_tokens(llama_path, PROMPTS[0], NUM_TOKENS, DEVICE)
        [cached] = collect_all(cluster.gateway, MESSAGES[:1])
        cached.assert_equals(undisturbed[0])
        for role in WORKERS:
            check_kill(cluster, metrics_address, role, undisturbed)
        assert cluster.dense.GetInfo(dense_pb2.GetInfoRequest()).device == "cuda:0"
        assert "MPS" not in cluster.log_file.read_text()
