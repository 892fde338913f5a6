"""Vectors from one GPU are those of Hugging Face, in steps of their own, which are CUDA graphs, and beside streams."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2
import numpy as np
import pytest
import torch

from tests.gpu.gpu_cluster import DEVICE, gpu_cluster
from tests.support.cluster import REQUEST_TIMEOUT_S, Cluster, free_port
from tests.support.reference import make_served_model, random_prompts, reference_model, reference_tokens

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

TOLERANCE = 1e-3  # both sum float32 in other orders
PROMPTS = [*random_prompts(12, longest=300, seed=5), *random_prompts(3, longest=900, seed=6)]
MAX_TOKENS = 200
POOL = {"last": lambda states: states[-1], "mean": lambda states: states.mean(0)}
MODES = {"last": "lasttoken", "mean": "mean"}


def embed(cluster: Cluster) -> np.ndarray:
    url = f"http://{cluster.http_address}/v1/embeddings"
    response = httpx2.post(url, json={"input": PROMPTS, "normalize": True}, timeout=REQUEST_TIMEOUT_S)
    assert response.status_code == 200, response.text
    return np.array([each["embedding"] for each in response.json()["data"]])


@torch.inference_mode()
def wanted(path: Path, method: str) -> np.ndarray:
    model, found = reference_model(path, DEVICE), []
    for prompt in PROMPTS:
        states = model(torch.tensor([prompt], device=DEVICE), output_hidden_states=True).hidden_states[-1][0]
        found.append(torch.nn.functional.normalize(POOL[method](states), dim=0).cpu().numpy())
    return np.array(found)


@pytest.mark.parametrize("method", MODES)
def test_vectors_equal_hugging_face_alone_and_beside_a_stream(method: str, tmp_path: Path) -> None:
    """Steps of up to 1,024 tokens, with prompts in chunks; more than one size of them is captured."""
    (tmp_path / "model").mkdir()
    path = make_served_model(
        tmp_path / "model", "llama", hidden_size=128, head_dim=32, max_position_embeddings=2048
    )
    modules = [{"path": "", "type": "x.Transformer"}, {"path": "1_Pooling", "type": "x.Pooling"}]
    (path / "modules.json").write_text(json.dumps(modules))
    (path / "1_Pooling").mkdir()
    (path / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode": MODES[method]}))
    settings = (
        f"model.path={path}",
        "model.dtype=float32",
        f"gateway.http_address=127.0.0.1:{free_port()}",
        "scheduler.max_num_batched_tokens=1024",
        "scheduler.max_num_seqs=16",
    )
    run_dir = tmp_path / "cluster"
    run_dir.mkdir()
    vectors = wanted(path, method)
    with gpu_cluster(run_dir, *settings) as cluster, ThreadPoolExecutor(1) as threads:
        for _ in range(2):
            np.testing.assert_allclose(embed(cluster), vectors, atol=TOLERANCE, rtol=0)
        assert re.search(r"num_hidden=\d", cluster.log_file.read_text()), "steps of vectors have graphs"
        plain = threads.submit(cluster.generate, PROMPTS[0], MAX_TOKENS)
        np.testing.assert_allclose(embed(cluster), vectors, atol=TOLERANCE, rtol=0)
        assert plain.result().token_ids == reference_tokens(path, PROMPTS[0], MAX_TOKENS, DEVICE)
        cluster.wait_idle()
