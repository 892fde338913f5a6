"""Two GPUs, in every arrangement: the tokens of Hugging Face in float32, also when any of the processes dies."""

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
LANES = "scheduler.num_lanes=2"
FAR = ("dense.device=cuda:0", "attention.device=cuda:1")
ARRANGEMENTS = {
    "tensor": ("dense.tensor_parallel_size=2",),
    "pipeline": ("dense.pipeline_parallel_size=2",),
    "pipeline-lanes": ("dense.pipeline_parallel_size=2", LANES),
    "far": FAR,
    "far-lanes": (*FAR, LANES),
    "workers": ("attention.workers=2", 'attention.devices=["cuda:0", "cuda:1"]'),
}
# All processes of an arrangement: two ranks, a dense worker with an attention worker, or with two.
ALL_PROCESSES = {"far": ("dense_worker", "attn_worker"), "workers": ("dense_worker", "attn_worker", "attn_worker-1")}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("llama-gqa")
    return make_served_model(directory, "llama", hidden_size=128, head_dim=32, max_position_embeddings=2048)


@pytest.fixture(scope="module", params=ARRANGEMENTS)
def cluster(
    request: pytest.FixtureRequest, path: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    settings = (f"model.path={path}", "model.dtype=float32", "scheduler.max_num_seqs=8", "attention.num_blocks=400")
    lazily = ("dense.captures_lazily=true", "attention.captures_lazily=true")
    own = ARRANGEMENTS[request.param]
    with running_cluster(tmp_path_factory.mktemp("two-gpus"), *settings, *lazily, *own) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def expected(path: Path) -> list[list[int]]:
    return [reference_tokens(path, prompt, NUM_TOKENS) for prompt in PROMPTS]


def tokens_of(cluster: Cluster, name: str | None = None) -> list[list[int]]:
    """The tokens of all prompts at once, while a process is killed."""

    def kill() -> None:
        if name is not None:
            os.kill(pid_of(cluster, name), signal.SIGKILL)

    messages = [request_of(prompt, NUM_TOKENS, ignore_eos=True) for prompt in PROMPTS]
    return [each.token_ids[0] for each in collect_all(cluster.gateway, messages, kill)]


def test_tokens_are_those_of_hugging_face(cluster: Cluster, expected: list[list[int]]) -> None:
    assert tokens_of(cluster) == expected
    cluster.wait_idle()


@pytest.mark.parametrize("name", PROCESSES)
def test_streams_end_as_without_the_kill(
    request: pytest.FixtureRequest, cluster: Cluster, expected: list[list[int]], name: str
) -> None:
    arrangement = request.node.callspec.params["cluster"].removesuffix("-lanes")
    if name not in ALL_PROCESSES.get(arrangement, PROCESSES):
        pytest.skip(f"{arrangement} has no {name}")
    assert tokens_of(cluster, name) == expected
    cluster.wait_idle()
