"""Two lanes on one GPU: the tokens of Hugging Face in float32, also when a worker dies. `ranks` has two GPUs."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.clients.streams import collect_all
from tests.support.cluster import Cluster, running_cluster
from tests.support.cluster import request as request_of
from tests.support.rank_processes import pid_of
from tests.support.reference import make_served_model, random_prompts, reference_tokens

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(400)]

PROMPTS = random_prompts(6, longest=150, seed=6)
NUM_TOKENS = 300


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("llama-gqa")
    return make_served_model(directory, "llama", hidden_size=128, head_dim=32, max_position_embeddings=2048)


@pytest.fixture(scope="module")
def cluster(path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    settings = (f"model.path={path}", "model.dtype=float32", "scheduler.max_num_seqs=8", "attention.num_blocks=400")
    lanes = ("scheduler.num_lanes=2", "dense.captures_lazily=true", "attention.captures_lazily=true")
    with running_cluster(tmp_path_factory.mktemp("lanes"), *settings, *lanes) as cluster:
        yield cluster


@pytest.mark.parametrize("name", [None, "dense_worker", "attn_worker"])
def test_streams_are_those_of_hugging_face_whoever_dies(cluster: Cluster, path: Path, name: str | None) -> None:
    def kill() -> None:
        if name is not None:
            os.kill(pid_of(cluster, name), signal.SIGKILL)

    messages = [request_of(prompt, NUM_TOKENS, ignore_eos=True) for prompt in PROMPTS]
    answers = collect_all(cluster.gateway, messages, kill)
    assert [each.token_ids[0] for each in answers] == [reference_tokens(path, each, NUM_TOKENS) for each in PROMPTS]
    cluster.wait_idle()
