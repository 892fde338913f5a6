"""/flush_cache: later requests find nothing of earlier ones, also when the dense worker that was told so is killed."""

from __future__ import annotations

import os
import signal

import httpx2

from services.common.config import EMBEDDED_MODEL
from tests.support.cluster import Cluster
from tests.support.reference import reference_tokens

NUM_TOKENS = 8
NUM_STREAMED = 20  # each is followed by a flush


def num_cached(cluster: Cluster, prompt: list[int]) -> int:
    """How many of a prompt's tokens are found; the answer must be that of Hugging Face."""
    body = {
        "input_ids": prompt,
        "sampling_params": {"max_new_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True},
    }
    answer = httpx2.post(f"http://{cluster.http_address}/generate", json=body, timeout=60).json()
    assert answer["output_ids"] == reference_tokens(EMBEDDED_MODEL, prompt, NUM_TOKENS)
    return answer["meta_info"]["cached_tokens"]


def flush(cluster: Cluster, path: str) -> None:
    answer = httpx2.post(f"http://{cluster.http_address}{path}", timeout=60)
    assert (answer.status_code, answer.text) == (200, "Cache flushed.\n")


def test_later_requests_find_nothing_of_earlier_ones_also_over_a_kill(cluster: Cluster) -> None:
    first, second = list(range(100, 200)), list(range(300, 400))
    assert num_cached(cluster, first) == 0 and num_cached(cluster, first) > 64
    flush(cluster, "/flush_cache")
    assert num_cached(cluster, first) == 0 and num_cached(cluster, first) > 64
    flush(cluster, "/reset_prefix_cache")
    assert num_cached(cluster, second) == 0
    os.kill(cluster.pid_of("dense_worker"), signal.SIGKILL)
    assert num_cached(cluster, second) > 64, "the KV cache outlives the dense worker"
    assert num_cached(cluster, first) == 0
    flush(cluster, "/flush_cache")
    os.kill(cluster.pid_of("dense_worker"), signal.SIGKILL)
    assert num_cached(cluster, first) == 0, "although no request has come between"


def test_a_stream_goes_on_while_the_cache_is_flushed(cluster: Cluster) -> None:
    prompt = list(range(500, 560))
    body = {
        "prompt": prompt,
        "max_tokens": NUM_STREAMED,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
    }
    token_ids = list[int]()
    with httpx2.stream("POST", f"http://{cluster.http_address}/v1/completions", json=body, timeout=60) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                token_ids += httpx2.Response(200, content=line[6:]).json()["choices"][0]["token_ids"]
                flush(cluster, "/flush_cache")
    assert token_ids == reference_tokens(EMBEDDED_MODEL, prompt, NUM_STREAMED)
    cluster.wait_idle()
