"""/flush_cache: later requests find nothing of earlier ones, also when the processes that were told so are killed."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

import httpx2
import pytest

from services.common.config import EMBEDDED_MODEL
from tests.support.cluster import Cluster, free_port, running_cluster
from tests.support.reference import reference_tokens

NUM_TOKENS = 8
NUM_STREAMED = 20  # each is followed by a flush
WAIT_S = 60.0


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


@pytest.mark.parametrize("settings", [(), ("attention.workers=2",), ("dense.tensor_parallel_size=2",)], ids=" ".join)
def test_only_the_attention_workers_live_on_after_a_flush(tmp_path: Path, settings: tuple[str, ...]) -> None:
    prompt = list(range(100, 200))
    http_address = f"gateway.http_address=127.0.0.1:{free_port()}"
    with running_cluster(tmp_path, http_address, *settings, is_warm=True) as cluster:
        assert num_cached(cluster, prompt) == 0 and num_cached(cluster, prompt) > 64
        flush(cluster, "/flush_cache")
        cluster.kill("gateway", "dense_worker")
        wait_ready(cluster)
        assert num_cached(cluster, prompt) == 0, "although no request has come between"
        cluster.kill("gateway", "dense_worker")
        wait_ready(cluster)
        assert num_cached(cluster, prompt) > 64, "the KV cache outlives both"


def wait_ready(cluster: Cluster) -> None:
    deadline = time.monotonic() + WAIT_S
    while True:
        with contextlib.suppress(httpx2.TransportError):
            if httpx2.get(f"http://{cluster.http_address}/health", timeout=WAIT_S).status_code == 200:
                return
        assert time.monotonic() < deadline, "the new gateway is not ready"
        time.sleep(0.05)


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
