"""Two ranks or stages on two GPUs: the tokens of Hugging Face in float32, also when any of their processes dies."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.support.clients.streams import collect_all
from tests.support.cluster import Cluster, running_cluster
from tests.support.cluster import request as request_of
from tests.support.rank_processes import PROCESSES, pid_of
from tests.support.reference import make_served_model, random_prompts, reference_tokens

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(400),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="each rank needs a GPU of its own"),
]

PROMPTS = random_prompts(4, longest=150, seed=6)
NUM_TOKENS = 300


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("llama-gqa")
    return make_served_model(directory, "llama", hidden_size=128, head_dim=32, max_position_embeddings=2048)


@pytest.fixture(scope="module", params=["tensor", "pipeline"])
def cluster(
    request: pytest.FixtureRequest, path: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    settings = (f"model.path={path}", "model.dtype=float32", "scheduler.max_num_seqs=8", "attention.num_blocks=400")
    ranks = (f"dense.{request.param}_parallel_size=2", "dense.captures_lazily=true", "attention.captures_lazily=true")
    with running_cluster(tmp_path_factory.mktemp("ranks"), *settings, *ranks) as cluster:
        yield cluster


def tokens_of(cluster: Cluster, name: str | None = None) -> list[list[int]]:
    """The tokens of all prompts at once, while a process is killed."""

    def kill() -> None:
        if name is not None:
            os.kill(pid_of(cluster, name), signal.SIGKILL)

    messages = [request_of(prompt, NUM_TOKENS, ignore_eos=True) for prompt in PROMPTS]
    return [each.token_ids[0] for each in collect_all(cluster.gateway, messages, kill)]


def test_tokens_are_those_of_hugging_face(cluster: Cluster, path: Path) -> None:
    assert tokens_of(cluster) == [reference_tokens(path, prompt, NUM_TOKENS) for prompt in PROMPTS]
    cluster.wait_idle()


@pytest.mark.parametrize("name", PROCESSES)
def test_streams_end_as_without_the_kill(cluster: Cluster, name: str) -> None:
    undisturbed = tokens_of(cluster)
    assert tokens_of(cluster, name) == undisturbed
    cluster.wait_idle()
