"""Two attention workers, on one GPU or two: the tokens of Hugging Face in float32, also when one comes, goes, or dies.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.gpu.gpu_streams import MESSAGES, expected_tokens, small_cluster, tokens_of
from tests.support.clients.streams import collect_all
from tests.support.cluster import Cluster, ctl

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(400)]

DEVICES = {"one-gpu": (), "two-gpus": ('attention.devices=["cuda:0", "cuda:1"]',)}


@pytest.fixture(scope="module", params=DEVICES)
def cluster(
    request: pytest.FixtureRequest, llama_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    if request.param == "two-gpus" and torch.cuda.device_count() < 2:
        pytest.skip("it needs two GPUs")
    devices = DEVICES[request.param]
    with small_cluster(llama_path, tmp_path_factory.mktemp("workers"), "attention.workers=2", *devices) as cluster:
        yield cluster


def test_a_worker_comes_and_goes(cluster: Cluster, llama_path: Path) -> None:
    """First of all, while nothing is cached: so the worker that comes gets some of the sequences."""
    assert "added attn_worker-2" in ctl(cluster, "add-attention").stdout
    assert len(cluster.dense_status().attention_workers) == 3
    num_sequences, drained = list[int](), list[str]()

    def drain() -> None:
        num_sequences[:] = [each.num_sequences for each in cluster.dense_status().attention_workers]
        drained.append(ctl(cluster, "drain-attention", "attn_worker-2").stdout)

    collected = collect_all(cluster.gateway, MESSAGES, drain)
    assert [each.token_ids[0] for each in collected] == expected_tokens(llama_path)
    assert drained == ["attn_worker-2 has no sequence any more, and has been stopped\n"]
    assert len(num_sequences) == 3 and num_sequences[2] > 0
    assert cluster.num_copied_tokens() == 0, "computing is faster"


@pytest.mark.parametrize("name", [None, "attn_worker-1", "attn_worker", "dense_worker"])
def test_streams_are_those_of_hugging_face_whoever_dies(cluster: Cluster, llama_path: Path, name: str | None) -> None:
    assert tokens_of(cluster, name) == expected_tokens(llama_path)
