"""Two attention workers on one GPU: the tokens of Hugging Face in float32, also when one comes, goes, or dies."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.gpu.gpu_streams import MESSAGES, expected_tokens, small_cluster, tokens_of
from tests.support.clients.streams import collect_all
from tests.support.cluster import Cluster, ctl

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def cluster(llama_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with small_cluster(llama_path, tmp_path_factory.mktemp("workers"), "attention.workers=2") as cluster:
        yield cluster


@pytest.mark.parametrize("name", [None, "attn_worker-1", "attn_worker", "dense_worker"])
def test_streams_are_those_of_hugging_face_whoever_dies(cluster: Cluster, llama_path: Path, name: str | None) -> None:
    assert tokens_of(cluster, name) == expected_tokens(llama_path)


def test_a_worker_comes_and_goes(cluster: Cluster, llama_path: Path) -> None:
    assert "added attn_worker-2" in ctl(cluster, "add-attention").stdout
    assert len(cluster.dense_status().attention_workers) == 3
    drained = list[str]()
    collected = collect_all(
        cluster.gateway, MESSAGES, lambda: drained.append(ctl(cluster, "drain-attention", "attn_worker-2").stdout)
    )
    assert [each.token_ids[0] for each in collected] == expected_tokens(llama_path)
    assert drained == ["attn_worker-2 has no sequence any more, and has been stopped\n"]
