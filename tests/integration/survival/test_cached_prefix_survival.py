"""A worker dies under streams whose prompts were cached: tokens stay the same, and `usage` says what had been found.

Hugging Face gives the expected tokens.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from services.common.config import EMBEDDED_MODEL
from tests.support.clients.http_clients import client
from tests.support.clients.streams import STREAM_TIMEOUT_S
from tests.support.cluster import REQUEST_TIMEOUT_S, Cluster, request, running_cluster
from tests.support.reference import random_prompts, reference_tokens

pytestmark = pytest.mark.timeout(400)  # processes start several times, and the machine may be slow

BLOCK_SIZE, NUM_STREAMS, NUM_TOKENS, MAX_ROUNDS = 16, 2, 80, 10
NUM_CACHED = 6 * BLOCK_SIZE
[PREFIX] = random_prompts(1, NUM_CACHED, seed=3)
ROLES = pytest.mark.parametrize(
    "roles", [("dense_worker",), ("attn_worker",), ("dense_worker", "attn_worker")], ids=" and ".join
)
Answer = tuple[list[int], int]  # tokens, and how many of the prompt's had been cached


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    settings = ("model.dtype=float32", f"attention.block_size={BLOCK_SIZE}")
    with running_cluster(tmp_path_factory.mktemp("cached"), *settings, is_warm=True) as cluster:
        yield cluster
        cluster.wait_idle()


def cached_prompts(cluster: Cluster) -> list[list[int]]:
    """Prompts that begin with the prefix, which has just been computed."""
    cluster.generate([*PREFIX, 5], 1)
    return [[*PREFIX, *range(10 * index, 10 * index + 9)] for index in range(1, 1 + NUM_STREAMS)]


def ask(cluster: Cluster, prompt: list[int], has_begun: threading.Event) -> Answer:
    token_ids = []
    for chunk in cluster.gateway.GenerateStream(request(prompt, NUM_TOKENS, ignore_eos=True), timeout=STREAM_TIMEOUT_S):
        token_ids += chunk.token_ids
        has_begun.set()
    return token_ids, chunk.finish.usage.num_cached_tokens


def expected(prompt: list[int], num_cached: int) -> Answer:
    return reference_tokens(EMBEDDED_MODEL, prompt, NUM_TOKENS), num_cached


def num_open(cluster: Cluster) -> float:
    """How many answers the gateway has not ended."""
    with client(cluster.http_address) as http:
        lines = http.get("/metrics").text.splitlines()
    [value] = [line.split()[1] for line in lines if line.startswith("twostroke_gateway_answers_open ")]
    return float(value)


@ROLES
def test_a_kill_in_the_middle_does_not_change_what_had_been_found(cluster: Cluster, roles: tuple[str, ...]) -> None:
    for _ in range(MAX_ROUNDS):
        prompts, has_begun = cached_prompts(cluster), [threading.Event() for _ in range(NUM_STREAMS)]
        with ThreadPoolExecutor(NUM_STREAMS) as threads:
            pairs = zip(prompts, has_begun, strict=True)
            answers = [threads.submit(ask, cluster, prompt, event) for prompt, event in pairs]
            assert all(event.wait(STREAM_TIMEOUT_S) for event in has_begun)
            is_in_the_middle = not any(answer.done() for answer in answers)
            cluster.kill(*roles)
            assert [answer.result() for answer in answers] == [expected(prompt, NUM_CACHED) for prompt in prompts]
        cluster.wait_idle()
        if is_in_the_middle:
            again = ask(cluster, prompts[0], threading.Event())
            assert again == expected(prompts[0], NUM_CACHED), "what has been computed again is found again"
            return
    raise AssertionError(f"in all of {MAX_ROUNDS} rounds an answer ended before the kill")


@ROLES
def test_a_kill_before_the_first_token_counts_what_the_workers_have_after_it(
    cluster: Cluster, roles: tuple[str, ...]
) -> None:
    """The attention worker is stopped before the request comes, so that it computes nothing."""
    [prompt, *_] = cached_prompts(cluster)
    cluster.wait_idle()
    attention = cluster.pid_of("attn_worker")
    os.kill(attention, signal.SIGSTOP)
    with ThreadPoolExecutor(1) as threads:
        answer = threads.submit(ask, cluster, prompt, threading.Event())
        deadline = time.monotonic() + REQUEST_TIMEOUT_S
        while num_open(cluster) == 0:
            assert time.monotonic() < deadline, "the request does not come"
            time.sleep(0.01)
        cluster.kill(*roles)
        with contextlib.suppress(ProcessLookupError):
            os.kill(attention, signal.SIGCONT)
        assert answer.result() == expected(prompt, 0 if "attn_worker" in roles else NUM_CACHED)
    cluster.wait_idle()
