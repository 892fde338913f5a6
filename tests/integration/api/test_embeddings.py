"""Embeddings by the last token of the embedded model, through three processes, beside Hugging Face's hidden states."""

from __future__ import annotations

import base64
import concurrent.futures
import itertools
from typing import Any

import grpc
import httpx2
import numpy as np
import openai
import pytest
import torch

from services.common.config import EMBEDDED_MODEL
from services.pb import gateway_pb2
from tests.support.clients.interrupted import over_a_kill
from tests.support.cluster import REQUEST_TIMEOUT_S, Cluster
from tests.support.reference import VOCAB_SIZE, reference_model

TOLERANCE = 2e-5  # of vectors of length 1; both sum in other orders


def random_prompt(num_tokens: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(10, VOCAB_SIZE, num_tokens).tolist()


@torch.inference_mode()
def wanted(token_ids: list[int]) -> np.ndarray:
    """The last hidden state of the last token, with length 1."""
    states = reference_model(EMBEDDED_MODEL)(torch.tensor([token_ids]), output_hidden_states=True).hidden_states[-1]
    return torch.nn.functional.normalize(states[0, -1], dim=0).numpy()


def post(cluster: Cluster, body: dict[str, Any], status: int = 200, path: str = "/v1/embeddings") -> Any:
    response = httpx2.post(f"http://{cluster.http_address}{path}", json=body, timeout=REQUEST_TIMEOUT_S)
    assert response.status_code == status, response.text
    return response.json()


def vectors_of(answer: dict[str, Any]) -> np.ndarray:
    assert [each["index"] for each in answer["data"]] == list(range(len(answer["data"])))
    return np.array([each["embedding"] for each in answer["data"]])


def test_token_ids_of_any_length_give_the_states_of_transformers(cluster: Cluster) -> None:
    """The second time their beginnings are in the prefix cache."""
    prompts = [random_prompt(count, seed=count) for count in (1, 2, 33, 150)]
    for _ in range(2):
        answer = post(cluster, {"input": prompts})
        np.testing.assert_allclose(vectors_of(answer), [wanted(each) for each in prompts], atol=TOLERANCE)
    assert answer["usage"] == {"prompt_tokens": 186, "total_tokens": 186}
    np.testing.assert_allclose(vectors_of(post(cluster, {"input": prompts[2]})), [wanted(prompts[2])], atol=TOLERANCE)


def test_the_client_of_openai_gets_texts_in_both_forms(cluster: Cluster) -> None:
    texts = ["San Francisco is a", "What is the capital of France?", "a"]
    lists = post(cluster, {"prompt": texts}, path="/tokenize")["tokens"]
    with openai.OpenAI(base_url=f"http://{cluster.http_address}/v1", api_key="none") as client:
        for encoding_format in (openai.omit, "float", "base64"):  # the client asks for base64 by itself
            answer = client.embeddings.create(model="tiny-llama", input=texts, encoding_format=encoding_format)
            found = [each.embedding for each in answer.data]
            if encoding_format == "base64":
                found = [np.frombuffer(base64.b64decode(each), "<f4") for each in found]
            np.testing.assert_allclose(found, [wanted(each) for each in lists], atol=TOLERANCE)
        assert answer.model == "tiny-llama" and answer.usage.prompt_tokens == sum(map(len, lists))
        one = client.embeddings.create(model="tiny-llama", input=texts[0], dimensions=5)
    cut = wanted(lists[0])[:5]
    np.testing.assert_allclose(one.data[0].embedding, cut / np.linalg.norm(cut), atol=TOLERANCE)


def test_inputs_are_cut_only_if_asked(cluster: Cluster) -> None:
    prompt = random_prompt(40, seed=1)
    cut = vectors_of(post(cluster, {"input": prompt, "truncate_prompt_tokens": 30}))
    np.testing.assert_allclose(cut, [wanted(prompt[:30])], atol=TOLERANCE)
    raw = vectors_of(post(cluster, {"input": prompt, "normalize": False}))[0]
    assert abs(np.linalg.norm(raw) - 1) > 0.1
    np.testing.assert_allclose(raw / np.linalg.norm(raw), wanted(prompt), atol=TOLERANCE)


def test_scores_are_cosines_between_embeddings(cluster: Cluster) -> None:
    query, documents = "What is the capital of France?", ["Paris", "San Francisco is a", "a", "Paris"]
    lists = post(cluster, {"prompt": [query, *documents]}, path="/tokenize")["tokens"]
    vectors = [wanted(each) for each in lists]
    cosines = [float(vectors[0] @ each) for each in vectors[1:]]
    data = post(cluster, {"text_1": query, "text_2": documents}, path="/score")["data"]
    assert [each["score"] for each in data] == pytest.approx(cosines, abs=TOLERANCE)
    results = post(cluster, {"query": query, "documents": documents}, path="/v1/rerank")["results"]
    assert [each["index"] for each in results] == sorted(range(4), key=lambda i: -cosines[i])
    assert "no classifier" in post(cluster, {"input": "a"}, 400, "/classify")["error"]["message"]


def test_grpc_gives_the_same(cluster: Cluster) -> None:
    texts, prompt = ["San Francisco is a", "a"], random_prompt(9, seed=3)
    inputs = [gateway_pb2.EmbedInput(text=text) for text in texts]
    inputs.append(gateway_pb2.EmbedInput(token_ids=gateway_pb2.TokenIds(ids=prompt)))
    found = cluster.gateway.Embed(gateway_pb2.EmbedRequest(inputs=inputs), timeout=REQUEST_TIMEOUT_S)
    lists = [*post(cluster, {"prompt": texts}, path="/tokenize")["tokens"], prompt]
    vectors = [wanted(each) for each in lists]
    np.testing.assert_allclose([each.values for each in found.vectors], vectors, atol=TOLERANCE)
    assert found.num_prompt_tokens == sum(map(len, lists)) and not found.labels
    options = gateway_pb2.InputOptions(truncate_tokens=4)
    request = gateway_pb2.EmbedRequest(inputs=inputs[2:], dimensions=6, normalize=False, options=options)
    [cut] = cluster.gateway.Embed(request, timeout=REQUEST_TIMEOUT_S).vectors
    first = wanted(prompt[:4])[:6]
    unit = np.array(cut.values) / np.linalg.norm(cut.values)
    np.testing.assert_allclose(unit, first / np.linalg.norm(first), atol=TOLERANCE)
    pairs = [gateway_pb2.TextPair(first=texts[0], second=texts[1])]
    scored = cluster.gateway.Score(gateway_pb2.ScoreRequest(pairs=pairs), timeout=REQUEST_TIMEOUT_S)
    assert list(scored.scores) == pytest.approx([float(vectors[0] @ vectors[1])], abs=TOLERANCE)
    for bad, part in (([], "0 elements"), ([gateway_pb2.EmbedInput()], "inputs[0] is empty")):
        with pytest.raises(grpc.RpcError) as refused:
            cluster.gateway.Embed(gateway_pb2.EmbedRequest(inputs=bad), timeout=REQUEST_TIMEOUT_S)
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT and part in refused.value.details()
    for ask in (cluster.gateway.Generate, lambda *args, **kw: list(cluster.gateway.GenerateStream(*args, **kw))):
        with pytest.raises(grpc.RpcError, match="return_pooled"):
            ask(gateway_pb2.GenerateRequest(prompt="a", return_pooled=True), timeout=REQUEST_TIMEOUT_S)


def test_requests_without_names_do_not_meet(cluster: Cluster) -> None:
    inputs = [gateway_pb2.EmbedInput(token_ids=gateway_pb2.TokenIds(ids=random_prompt(60, seed))) for seed in range(8)]
    with concurrent.futures.ThreadPoolExecutor(8) as threads:
        asked = [gateway_pb2.EmbedRequest(inputs=inputs)] * 8
        answers = list(threads.map(lambda each: cluster.gateway.Embed(each, timeout=REQUEST_TIMEOUT_S), asked))
    for each in answers:
        np.testing.assert_allclose(
            [vector.values for vector in each.vectors], [vector.values for vector in answers[0].vectors], atol=TOLERANCE
        )


def test_clients_of_triton_get_the_same(cluster: Cluster) -> None:
    texts = ["San Francisco is a", "a"]
    lists = post(cluster, {"prompt": texts}, path="/tokenize")["tokens"]
    vectors = [wanted(each) for each in lists]
    found = post(cluster, {"text_input": texts[0]}, path="/v2/models/embedding/generate")
    np.testing.assert_allclose(found["embedding"], vectors[0], atol=TOLERANCE)
    tensor = {"name": "text_input", "datatype": "BYTES", "shape": [2, 1], "data": texts}
    [output] = post(cluster, {"inputs": [tensor]}, path="/v2/models/embedding/infer")["outputs"]
    assert (output["name"], output["datatype"], output["shape"]) == ("embedding", "FP32", [2, len(vectors[0])])
    np.testing.assert_allclose(np.reshape(output["data"], output["shape"]), vectors, atol=TOLERANCE)
    size = max(map(len, lists)) + 2
    padded = [token_id for each in lists for token_id in [*each, *[0] * (size - len(each))]]
    ids = {"name": "input_ids", "datatype": "INT32", "shape": [2, size], "data": padded}
    lengths = {"name": "input_lengths", "datatype": "INT32", "shape": [2, 1], "data": [*map(len, lists)]}
    [output] = post(cluster, {"inputs": [ids, lengths]}, path="/v2/models/embedding/infer")["outputs"]
    np.testing.assert_allclose(np.reshape(output["data"], output["shape"]), vectors, atol=TOLERANCE)
    found = post(cluster, {"input_ids": lists[1]}, path="/v2/models/embedding/generate")
    np.testing.assert_allclose(found["embedding"], vectors[1], atol=TOLERANCE)
    for wrong, part in (
        ([lengths], "exactly one"),
        ([ids, tensor], "exactly one"),
        ([ids, lengths | {"data": [1, size + 1]}], f"input_lengths is {size + 1}"),
        ([ids | {"data": [-1, *padded[1:]]}], "input_ids[0] is -1"),
    ):
        assert part in post(cluster, {"inputs": wrong}, 400, "/v2/models/embedding/infer")["error"]


def test_many_inputs_of_one_request(cluster: Cluster) -> None:
    """More than may be under way at once; they come back in order."""
    prompts = [random_prompt(1 + i % 7, seed=i) for i in range(300)]
    found = vectors_of(post(cluster, {"input": prompts}))
    for index in (0, 5, 13, 255, 256, 299):
        np.testing.assert_allclose(found[index], wanted(prompts[index]), atol=TOLERANCE)
    cluster.wait_idle()


@pytest.mark.parametrize("role", ["dense_worker", "attn_worker"])
def test_a_killed_worker_changes_no_vector(cluster: Cluster, role: str) -> None:
    seeds = itertools.count(1000 * len(role), 40)  # of prompts that are in no cache, at each attempt

    def ask() -> tuple[list[list[int]], np.ndarray]:
        first = next(seeds)
        prompts = [random_prompt(200 + i, seed=first + i) for i in range(40)]
        return prompts, vectors_of(post(cluster, {"input": prompts}))

    prompts, found = over_a_kill(
        ask, lambda: cluster.attention_status().num_computed_tokens, 500, lambda: cluster.kill(role)
    )
    for index in (0, 17, 39):
        np.testing.assert_allclose(found[index], wanted(prompts[index]), atol=TOLERANCE)
    cluster.wait_idle()


@pytest.mark.parametrize(
    "body, param, parts",
    [
        ({"input": []}, "input", ["0 elements"]),
        ({"input": "", "add_special_tokens": False}, "input", ["no tokens"]),
        ({"input": [[5], []]}, "input[1]", ["no tokens"]),
        ({"input": [5, VOCAB_SIZE]}, "input", ["out of vocabulary"]),
        ({"input": ["a", 5]}, "input[1]", []),
        ({"input": {"text": "a"}}, "input", []),
        ({}, "input", []),
        ({"input": [5] * 2049}, "input", ["2047", "context length"]),
        ({"input": "a " * 100_000}, "input", ["characters"]),
        ({"input": [[5]] * 2049}, "input", ["2049 elements", "2048", "gateway.max_inputs"]),
        ({"input": "a", "dimensions": 0}, "dimensions", []),
        ({"input": "a", "dimensions": 10**6}, "dimensions", ["1000000"]),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format", []),
        ({"input": "a", "messages": [{"role": "user", "content": "a"}]}, "input", ["exactly one"]),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(
    cluster: Cluster, body: dict[str, Any], param: str, parts: list[str]
) -> None:
    error = post(cluster, body, 400)["error"]
    assert error["param"] == param and error["type"] == "invalid_request_error", error
    assert all(part in error["message"] for part in parts), error


def test_another_model_is_not_found(cluster: Cluster) -> None:
    assert post(cluster, {"input": "a", "model": "other"}, 404)["error"]["code"] == "model_not_found"


@torch.inference_mode()
def test_vectors_of_all_tokens(cluster: Cluster) -> None:
    """Of prompts that take several steps, of which one follows the other in the prefix cache."""
    prompts = [random_prompt(count, seed=count) for count in (3, 700, 1)]
    prompts.append(prompts[1][:500])
    body = {"input": prompts, "task": "token_embed", "encoding_format": "base64"}
    for _ in range(2):
        data = post(cluster, body, path="/pooling")["data"]
        for each, prompt in zip(data, prompts, strict=True):
            states = reference_model(EMBEDDED_MODEL)(torch.tensor([prompt]), output_hidden_states=True).hidden_states
            units = torch.nn.functional.normalize(states[-1][0], dim=1)
            found = np.frombuffer(base64.b64decode(each["data"]), "<f4").reshape(units.shape)
            np.testing.assert_allclose(found, units, atol=TOLERANCE)
    cluster.wait_idle()
