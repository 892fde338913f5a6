"""How likely some tokens are together, over gRPC and SGLang's route, compared with transformers; also after a kill."""

from __future__ import annotations

from collections.abc import Iterator

import grpc
import httpx2
import pytest
import torch

from services.common.config import EMBEDDED_MODEL
from services.pb import gateway_pb2
from tests.support.cluster import REQUEST_TIMEOUT_S, Cluster, free_port, running_cluster
from tests.support.reference import random_prompts, reference_model

TOLERANCE = 1e-4  # both sum in other orders
ASKED = [5, 90, 17, 300]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    setting = f"gateway.http_address=127.0.0.1:{free_port()}"
    with running_cluster(tmp_path_factory.mktemp("mass"), setting, is_warm=True) as cluster:
        yield cluster


@torch.inference_mode()
def expected(prompt: list[int], token_ids: list[int], asked: list[int]) -> list[float]:
    logits = reference_model(EMBEDDED_MODEL)(torch.tensor([[*prompt, *token_ids]])).logits[0, len(prompt) - 1 : -1]
    return logits.softmax(-1)[:, asked].sum(-1).tolist()


def ask(prompt: list[int], max_tokens: int, **options: object) -> gateway_pb2.GenerateRequest:
    sampling = {"temperature": 1.5, "seed": 3}
    fields = {"token_mass": {"token_ids": ASKED}, **options}
    return gateway_pb2.GenerateRequest(
        prompt_token_ids={"ids": prompt}, max_tokens=max_tokens, ignore_eos=True, sampling=sampling, **fields
    )


def test_each_token_has_its_number_over_grpc_and_http(cluster: Cluster) -> None:
    prompt = random_prompts(1, 30, seed=1)[0]
    for completion in cluster.gateway.Generate(ask(prompt, 12, n=2), timeout=REQUEST_TIMEOUT_S).completions:
        token_ids = list(completion.token_ids)
        assert list(completion.token_mass) == pytest.approx(expected(prompt, token_ids, ASKED), abs=TOLERANCE)
    sampling = {"max_new_tokens": 9, "temperature": 0, "ignore_eos": True}
    body = {"input_ids": prompt, "token_mass": [7], "sampling_params": sampling}
    url = f"http://{cluster.http_address}/generate"
    answer = httpx2.post(url, json=body, timeout=REQUEST_TIMEOUT_S).json()
    found = answer["meta_info"]["token_mass"]
    assert len(found) == 9 and found == pytest.approx(expected(prompt, answer["output_ids"], [7]), abs=TOLERANCE)
    plain = httpx2.post(url, json=body | {"token_mass": []}, timeout=REQUEST_TIMEOUT_S).json()
    assert "token_mass" not in plain["meta_info"]
    refused = httpx2.post(url, json=body | {"token_mass": [7, 7]}, timeout=REQUEST_TIMEOUT_S)
    assert refused.status_code == 400 and "none of them twice" in refused.text


def test_a_token_out_of_the_vocabulary_is_refused_by_name(cluster: Cluster) -> None:
    with pytest.raises(grpc.RpcError) as refused:
        cluster.gateway.Generate(ask([5], 1, token_mass={"token_ids": [10**6]}), timeout=REQUEST_TIMEOUT_S)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT and "1000000" in refused.value.details()


@pytest.mark.parametrize("role", ["dense_worker", "attn_worker"])
def test_no_number_is_missing_after_a_worker_was_killed(cluster: Cluster, role: str) -> None:
    prompt, token_ids, found = random_prompts(1, 40, seed=2)[0], [], []
    for chunk in cluster.gateway.GenerateStream(ask(prompt, 400), timeout=2 * REQUEST_TIMEOUT_S):
        if len(token_ids) <= 20 < len(token_ids) + len(chunk.token_ids):
            cluster.kill(role)
        token_ids += chunk.token_ids
        found += chunk.token_mass
    assert len(token_ids) == 400
    assert found == pytest.approx(expected(prompt, token_ids, ASKED), abs=TOLERANCE)
