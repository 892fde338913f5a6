"""Two attention workers on one GPU: the tokens of Hugging Face in float32, also when one comes, goes, or dies."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.clients.streams import collect_all
from tests.support.cluster import Cluster, ctl, request, running_cluster
from tests.support.rank_processes import pid_of
from tests.support.reference import make_served_model, random_prompts, reference_tokens

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(400)]

PROMPTS = random_prompts(6, longest=150, seed=6)
NUM_TOKENS = 300
PROCESSES = ("attn_worker-1", "attn_worker", "dense_worker")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("llama-gqa")
    return make_served_model(directory, "llama", hidden_size=128, head_dim=32, max_position_embeddings=2048)


@pytest.fixture(scope="module")
def cluster(path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    settings = (f"model.path={path}", "model.dtype=float32", "scheduler.max_num_seqs=8", "attention.num_blocks=400")
    workers = ("attention.workers=2", "dense.captures_lazily=true", "attention.captures_lazily=true")
    with running_cluster(tmp_path_factory.mktemp("workers"), *settings, *workers) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def expected(path: Path) -> list[list[int]]:
    return [reference_tokens(path, prompt, NUM_TOKENS) for prompt in PROMPTS]


def tokens_of(cluster: Cluster, name: str | None = None) -> list[list[int]]:
    """The tokens of all prompts at once, while a process is killed."""

    def kill() -> None:
        if name is not None:
            os.kill(pid_of(cluster, name), signal.SIGKILL)

    messages = [request(prompt, NUM_TOKENS, ignore_eos=True) for prompt in PROMPTS]
    return [each.token_ids[0] for each in collect_all(cluster.gateway, messages, kill)]


def test_tokens_are_those_of_hugging_face(cluster: Cluster, expected: list[list[int]]) -> None:
    assert tokens_of(cluster) == expected
    cluster.wait_idle()


@pytest.mark.parametrize("name", PROCESSES)
def test_streams_end_as_without_the_kill(cluster: Cluster, expected: list[list[int]], name: str) -> None:
    assert tokens_of(cluster, name) == expected
    cluster.wait_idle()


def test_a_worker_comes_and_goes(cluster: Cluster, expected: list[list[int]]) -> None:
    assert "added attn_worker-2" in ctl(cluster, "add-attention").stdout
    assert len(cluster.dense_status().attention_workers) == 3
    messages = [request(prompt, NUM_TOKENS, ignore_eos=True) for prompt in PROMPTS]
    drained = list[str]()
    collected = collect_all(
        cluster.gateway, messages, lambda: drained.append(ctl(cluster, "drain-attention", "attn_worker-2").stdout)
    )
    assert [each.token_ids[0] for each in collected] == expected
    assert drained == ["attn_worker-2 has no sequence any more, and has been stopped\n"]
