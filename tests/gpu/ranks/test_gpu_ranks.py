"""Two GPUs, in every arrangement: the tokens of Hugging Face in float32, also when any of the processes dies."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.gpu.gpu_streams import expected_tokens, small_cluster, tokens_of
from tests.support.cluster import Cluster
from tests.support.rank_processes import PROCESSES

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(400),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="each rank needs a GPU of its own"),
]

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


@pytest.fixture(scope="module", params=ARRANGEMENTS)
def cluster(
    request: pytest.FixtureRequest, llama_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    with small_cluster(llama_path, tmp_path_factory.mktemp("two-gpus"), *ARRANGEMENTS[request.param]) as cluster:
        yield cluster


@pytest.mark.parametrize("name", [None, *PROCESSES])
def test_streams_are_those_of_hugging_face_whoever_dies(
    request: pytest.FixtureRequest, cluster: Cluster, llama_path: Path, name: str | None
) -> None:
    arrangement = request.node.callspec.params["cluster"].removesuffix("-lanes")
    if name is not None and name not in ALL_PROCESSES.get(arrangement, PROCESSES):
        pytest.skip(f"{arrangement} has no {name}")
    assert tokens_of(cluster, name) == expected_tokens(llama_path)
