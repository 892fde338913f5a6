"""Two lanes on one GPU: the tokens of Hugging Face in float32, also when a worker dies. `ranks` has two GPUs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.gpu.gpu_streams import expected_tokens, small_cluster, tokens_of
from tests.support.cluster import Cluster

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def cluster(llama_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with small_cluster(llama_path, tmp_path_factory.mktemp("lanes"), "scheduler.num_lanes=2") as cluster:
        yield cluster


@pytest.mark.parametrize("name", [None, "dense_worker", "attn_worker"])
def test_streams_are_those_of_hugging_face_whoever_dies(cluster: Cluster, llama_path: Path, name: str | None) -> None:
    assert tokens_of(cluster, name) == expected_tokens(llama_path)
