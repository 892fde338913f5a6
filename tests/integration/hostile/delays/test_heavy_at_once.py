"""Eight expensive, legal requests at once, on a server with one core: a bystander waits for at most 0.3 s."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.clients.crowd import Crowd
from tests.support.clients.http_clients import client
from tests.support.cluster import Cluster, running_cluster
from tests.support.expensive_bodies import CHATS, EXPENSIVE, HI, MODEL, TOOLS, encoded
from tests.support.models import ONE_LAYER
from tests.support.process_memory import resident_bytes

pytestmark = pytest.mark.timeout(600)

NUM_AT_ONCE = 8
MAX_WAIT_S = 0.3  # of a bystander, beyond four times the longest wait of the quiet time: others use this machine, too
MAX_GROWTH_BYTES = 96 * 2**20
MAX_LEFT_BYTES = 48 * 2**20  # after the answers
PAUSE_S = 0.02  # between two requests of the bystander, so that the core has time for the eight
NUM_QUIET = 10
NUM_TRIES = 5
ATTACKER, BYSTANDER = {"x-forwarded-for": "198.51.100.1"}, {"x-forwarded-for": "198.51.100.2"}
SHORT = {"model": MODEL, "prompt": "San Francisco is a", "max_tokens": 1, "temperature": 0}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, on_one_core: tuple[str, ...]) -> Iterator[Cluster]:
    """All services on one core. Steps are short, because a step with many prompt tokens delays a bystander, too."""
    overrides = (ONE_LAYER, "scheduler.max_num_batched_tokens=256", 'gateway.trusted_proxies=["unix"]')
    with running_cluster(tmp_path_factory.mktemp("at-once"), *overrides, wrapper=on_one_core, is_warm=True) as cluster:
        yield cluster
        cluster.wait_idle()


def every(token_id: int, count: int) -> list[int]:
    return [100 + (token_id + i) % 800 for i in range(count)]


MESSAGES_4001 = [HI, {"role": "assistant", "content": "a"}] * 2000 + [HI]
LOGITS = {
    "inputs": [
        {"name": "input_ids", "datatype": "INT32", "shape": [1, 800], "data": every(3, 800)},
        {"name": "input_lengths", "datatype": "INT32", "shape": [1, 1], "data": [800]},
        {"name": "request_output_len", "datatype": "INT32", "shape": [1, 1], "data": [1]},
        {"name": "return_context_logits", "datatype": "BOOL", "shape": [1, 1], "data": [True]},
    ]
}
GENERATE_LOGPROBS = {
    "input_ids": every(7, 1900),
    "sampling_params": {"n": 6, "max_new_tokens": 1},
    "return_logprob": True,
    "top_logprobs_num": 20,
    "logprob_start_len": 0,
    "return_text_in_logprobs": True,
}
HEAVY: dict[str, tuple[str, dict[str, Any], int]] = {  # path, body, status
    "log-probabilities of SGLang": ("/generate", GENERATE_LOGPROBS, 200),
    "log-probabilities of prompts": (
        "/v1/completions",
        {"prompt": [every(i, 1900) for i in range(6)], "prompt_logprobs": 20, "max_tokens": 1},
        200,
    ),
    "log-probabilities of the vocabulary, streamed": (
        "/v1/completions",
        {"prompt": every(5, 100), "prompt_logprobs": -1, "max_tokens": 1, "stream": True},
        200,
    ),
    "logits as JSON": ("/v2/models/tensorrt_llm/infer", LOGITS, 200),
    "4001 messages": EXPENSIVE["thousands of messages"],
    "a template of 4001 messages": ("/apply-template", {"messages": MESSAGES_4001}, 200),
    "3900 items": EXPENSIVE["a list of items"],
    "demanded tools": EXPENSIVE["tools that are demanded"],
    "tools of a chat": (CHATS, EXPENSIVE["tools of a chat"][1] | {"tools": TOOLS}, 200),
    "response_fields": (
        "/completion",
        {"prompt": "a", "n_predict": 1, "n_cmpl": 16, "response_fields": ["generation_settings/" + "a/" * 15_000] * 64},
        200,
    ),
}


@pytest.mark.parametrize("name", HEAVY)
def test_a_bystander_waits_for_a_moment(cluster: Cluster, name: str) -> None:
    path, body, status = HEAVY[name]
    requests = [(path, ATTACKER, encoded(body))] * NUM_AT_ONCE
    gateway, figures = cluster.pid_of("gateway"), []
    with client(cluster.http_address) as http:

        def wait_s() -> float:
            start = time.monotonic()
            answer = http.post("/v1/completions", json=SHORT, headers=BYSTANDER)
            assert answer.status_code == 200, answer.text
            return time.monotonic() - start

        for _ in range(NUM_TRIES):
            quiet_s = max(wait_s() for _ in range(NUM_QUIET))
            before = resident_bytes(gateway)
            waits, growths = [0.0], [0]
            crowd = Crowd(cluster.http_address, requests)
            while crowd.is_running:
                waits.append(wait_s() - 4 * quiet_s)
                time.sleep(PAUSE_S)
                growths.append(resident_bytes(gateway) - before)
            answers = crowd.answers()
            assert {got for got, _ in answers} <= {status, 429}, answers
            assert status in {got for got, _ in answers}, answers
            time.sleep(0.2)
            figures.append((max(waits), max(growths), resident_bytes(gateway) - before))
            limits = (MAX_WAIT_S, MAX_GROWTH_BYTES, MAX_LEFT_BYTES)
            if all(min(tries) <= most for tries, most in zip(zip(*figures, strict=True), limits, strict=True)):
                return
    raise AssertionError(
        "; ".join(
            f"a bystander waited for {wait:.2f} s too long, the gateway grew by {growth >> 20} MiB and kept "
            f"{left >> 20} MiB"
            for wait, growth, left in figures
        )
    )
