"""Hidden states from one GPU are those of Hugging Face, beside streams that run in CUDA graphs."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import httpx2
import numpy as np
import pytest
import torch

from tests.gpu.gpu_cluster import DEVICE, gpu_cluster
from tests.support.cluster import REQUEST_TIMEOUT_S, Cluster, free_port
from tests.support.reference import make_served_model, random_prompts, reference_model, reference_tokens

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

TOLERANCE = 1e-3  # of values of several units; both sum float32 in other orders
PROMPTS = random_prompts(3, longest=300, seed=5)  # the longest takes several steps
MAX_NUM_BATCHED_TOKENS = 96
MAX_TOKENS = 12
PLAIN_MAX_TOKENS = 200


class Served(NamedTuple):
    path: Path
    cluster: Cluster


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    path = make_served_model(
        tmp_path_factory.mktemp("model"), "llama", hidden_size=128, head_dim=32, max_position_embeddings=2048
    )
    settings = (
        f"model.path={path}",
        "model.dtype=float32",
        f"gateway.http_address=127.0.0.1:{free_port()}",
        f"scheduler.max_num_batched_tokens={MAX_NUM_BATCHED_TOKENS}",
        "scheduler.max_num_seqs=16",
    )
    with gpu_cluster(tmp_path_factory.mktemp("cluster"), *settings) as cluster:
        yield Served(path, cluster)


def ask(cluster: Cluster, prompt: list[int]) -> dict[str, Any]:
    sampling = {"max_new_tokens": MAX_TOKENS, "temperature": 0, "ignore_eos": True}
    body = {"input_ids": prompt, "return_hidden_states": True, "sampling_params": sampling}
    response = httpx2.post(f"http://{cluster.http_address}/generate", json=body, timeout=REQUEST_TIMEOUT_S)
    assert response.status_code == 200, response.text
    return response.json()


@torch.inference_mode()
def check(path: Path, prompt: list[int], answer: dict[str, Any]) -> None:
    """SGLang's form: first the states of the prompt, then one for each token but the last."""
    first, *others = answer["meta_info"]["hidden_states"]
    assert len(first) == len(prompt) and len(others) == MAX_TOKENS - 1
    tokens = torch.tensor([[*prompt, *answer["output_ids"][:-1]]], device=DEVICE)
    wanted = reference_model(path, DEVICE)(tokens, output_hidden_states=True).hidden_states[-1][0].cpu().numpy()
    np.testing.assert_allclose(np.array([*first, *others]), wanted, atol=TOLERANCE, rtol=0)


def test_hidden_states_equal_hugging_face_and_streams_beside_them_are_unchanged(served: Served) -> None:
    path, cluster = served
    with ThreadPoolExecutor(6) as threads:
        plain = threads.submit(cluster.generate, PROMPTS[0], PLAIN_MAX_TOKENS)
        for _ in range(2):  # the second time all prompts are in the prefix cache
            for prompt, answer in zip(PROMPTS, threads.map(lambda each: ask(cluster, each), PROMPTS), strict=True):
                check(path, prompt, answer)
        assert plain.result().token_ids == reference_tokens(path, PROMPTS[0], PLAIN_MAX_TOKENS, DEVICE)
    cluster.wait_idle()
