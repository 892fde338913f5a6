"""Latent attention, whose heads two GPUs share, gives the tokens of Hugging Face in float32, also when a shard dies."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.gpu.gpu_streams import expected_tokens, small_cluster, tokens_of
from tests.gpu.latent.test_gpu_latent_models import CASES
from tests.support.reference import make_served_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(400),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="each rank needs a GPU of its own"),
]


@pytest.mark.parametrize("case", ["v2-lite", "v3"])
def test_streams_are_those_of_hugging_face(case: str, tmp_path: Path) -> None:
    fields = {"hidden_size": 128, "max_position_embeddings": 1024} | CASES[case].fields
    path = make_served_model(tmp_path / "model", CASES[case].family, **fields)
    with small_cluster(path, tmp_path, "dense.tensor_parallel_size=2") as cluster:
        assert tokens_of(cluster) == expected_tokens(path)
        if case == "v3":
            assert tokens_of(cluster, "dense_worker-1") == expected_tokens(path)
