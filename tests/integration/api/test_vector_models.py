"""Rerankers with a template, and vectors for each token, through whole clusters, beside transformers."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from services.common.config import EMBEDDED_MODEL
from services.pb import gateway_pb2
from tests.support.cluster import REQUEST_TIMEOUT_S, Cluster, free_port, running_cluster
from tests.support.encoders import SIZES, add_tokenizer, make_bge_m3, make_colbert
from tests.support.reference import reference_model

TOLERANCE = 2e-5
QUERY, DOCUMENTS = "w1 w2 w3", ["w4 w1", "w9", "w3 w3 w7 w8 w1 w2", "w4 w1"]


def post(cluster: Cluster, path: str, body: dict[str, Any], status: int = 200) -> Any:
    response = httpx2.post(f"http://{cluster.http_address}{path}", json=body, timeout=REQUEST_TIMEOUT_S)
    assert response.status_code == status, response.text
    return response.json()


@torch.inference_mode()
def test_a_reranker_reads_pairs_in_its_template(tmp_path: Path) -> None:
    """The embedded model as a Qwen3-Reranker: its own tokenizer reads the template's special tokens as text."""
    vocab = json.loads((EMBEDDED_MODEL / "tokenizer.json").read_text())["model"]["vocab"]
    no, yes = "now", "us"
    settings = ("model.reranker=qwen3", f'model.classifier_from_token=["{no}", "{yes}"]')
    address = f"gateway.http_address=127.0.0.1:{free_port()}"
    tokenizer, model = AutoTokenizer.from_pretrained(EMBEDDED_MODEL), reference_model(EMBEDDED_MODEL)

    def wanted(document: str, instruction: str) -> float:
        pieces = (
            "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
            'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n',
            f"<Instruct>: {instruction}\n<Query>: Where is it?\n<Document>: {document}",
            "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
        )
        ids = [each for piece in pieces for each in tokenizer(piece, add_special_tokens=False).input_ids]
        logits = model(torch.tensor([ids])).logits[0, -1]
        return logits[[vocab[no], vocab[yes]]].softmax(0)[1].item()

    documents = ["In Paris.", "San Francisco is a city", "a"]
    web = "Given a web search query, retrieve relevant passages that answer the query"
    with running_cluster(tmp_path, *settings, address, is_warm=True) as cluster:
        scores = [wanted(each, web) for each in documents]
        data = post(cluster, "/score", {"text_1": "Where is it?", "text_2": documents})["data"]
        assert [each["score"] for each in data] == pytest.approx(scores, abs=TOLERANCE)
        body = {"query": "Where is it?", "documents": documents, "instruction": "Be strict"}
        strict = [wanted(each, "Be strict") for each in documents]
        results = post(cluster, "/v2/rerank", body)["results"]
        assert [each["index"] for each in results] == sorted(range(3), key=lambda i: -strict[i])
        found = [each["relevance_score"] for each in results]
        assert found == pytest.approx(sorted(strict, reverse=True), abs=TOLERANCE)
        assert max(abs(a - b) for a, b in zip(scores, strict, strict=True)) > 10 * TOLERANCE
        ids = tokenizer("San Francisco is a city").input_ids
        body = {"input": [ids, ids[:3]], "task": "token_classify"}  # the second has the first one's prefix
        for is_raw in (False, True):
            found = post(cluster, "/pooling", body | ({"use_activation": False} if is_raw else {}))["data"]
            logits = model(torch.tensor([ids])).logits[0]
            values = (logits[:, vocab[yes]] - logits[:, vocab[no]])[:, None]
            wanted_values = values if is_raw else values.sigmoid()
            for each, count in zip(found, (len(ids), 3), strict=True):
                np.testing.assert_allclose(each["data"], wanted_values[:count], atol=TOLERANCE)
        refused = post(cluster, "/pooling", {"input": "a", "task": "token_embed"}, 400)
        assert "does classify, score, token_classify" in refused["error"]["message"]
        cluster.wait_idle()


@torch.inference_mode()
def test_late_interaction_scores_by_the_vectors_of_tokens(tmp_path: Path) -> None:
    path = tmp_path / "model"
    model, linear = make_colbert(path, SIZES, 12)
    tokenizer = add_tokenizer(path)

    def tokens_of(text: str) -> torch.Tensor:
        states = model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0]
        return torch.nn.functional.normalize(states @ linear.T, dim=1)

    scores = [(tokens_of(QUERY) @ tokens_of(each).T).max(1).values.sum().item() for each in DOCUMENTS]
    settings = (f"model.path={path}", f"gateway.http_address=127.0.0.1:{free_port()}")
    run_dir = tmp_path / "cluster"
    run_dir.mkdir()
    with running_cluster(run_dir, *settings, is_warm=True) as cluster:
        data = post(cluster, "/score", {"text_1": QUERY, "text_2": DOCUMENTS})["data"]
        assert [each["score"] for each in data] == pytest.approx(scores, abs=5e-5)
        results = post(cluster, "/rerank", {"query": QUERY, "documents": DOCUMENTS})["results"]
        assert [each["index"] for each in results] == sorted(range(4), key=lambda i: -scores[i])
        pairs = [gateway_pb2.TextPair(first=QUERY, second=each) for each in DOCUMENTS]
        scored = cluster.gateway.Score(gateway_pb2.ScoreRequest(pairs=pairs), timeout=REQUEST_TIMEOUT_S)
        assert list(scored.scores) == pytest.approx(scores, abs=5e-5)
        body = {"input": DOCUMENTS, "task": "token_embed"}
        for encoding_format in ("float", "base64"):
            found = post(cluster, "/pooling", body | {"encoding_format": encoding_format})["data"]
            for each, document in zip(found, DOCUMENTS, strict=True):
                values = each["data"]
                if encoding_format == "base64":
                    values = np.frombuffer(base64.b64decode(values), "<f4").reshape(-1, 12)
                np.testing.assert_allclose(values, tokens_of(document), atol=TOLERANCE)
        refused = post(cluster, "/v1/embeddings", {"input": "w1"}, 400)
        assert "a vector of each token" in refused["error"]["message"]
        refused = post(cluster, "/pooling", {"input": "w1", "task": "embed"}, 400)
        assert "does token_embed" in refused["error"]["message"]


@torch.inference_mode()
def test_bge_m3_has_numbers_and_vectors_of_tokens(tmp_path: Path) -> None:
    """In the forms of vLLM and Text Embeddings Inference, beside the formulas of its own code."""
    path = tmp_path / "model"
    model, layers = make_bge_m3(path, SIZES | {"bos_token_id": 2, "eos_token_id": 3})
    tokenizer = add_tokenizer(path)
    texts = [*DOCUMENTS[:3], "w5 w5 w5 w6", "w1"]

    def states(text: str) -> tuple[list[int], torch.Tensor]:
        ids = tokenizer(text).input_ids
        return ids, model(input_ids=torch.tensor([ids])).last_hidden_state[0]

    settings = (f"model.path={path}", f"gateway.http_address=127.0.0.1:{free_port()}")
    run_dir = tmp_path / "cluster"
    run_dir.mkdir()
    with running_cluster(run_dir, *settings, is_warm=True) as cluster:
        dense = post(cluster, "/v1/embeddings", {"input": texts})["data"]
        numbers = post(cluster, "/pooling", {"input": texts, "task": "token_classify"})["data"]
        vectors = post(cluster, "/pooling", {"input": texts, "task": "token_embed"})["data"]
        sparse = post(cluster, "/embed_sparse", {"inputs": texts})
        every_state = post(cluster, "/embed_all", {"inputs": texts})
        num_zero = 0
        for i, text in enumerate(texts):
            ids, hidden = states(text)
            np.testing.assert_allclose(every_state[i], hidden, atol=10 * TOLERANCE)  # they are not normalised
            weights = layers["sparse"](hidden)[:, 0].relu()
            num_zero += int((weights == 0).sum())
            np.testing.assert_allclose(numbers[i]["data"], weights[1:-1], atol=TOLERANCE)
            of_tokens = torch.nn.functional.normalize(layers["colbert"](hidden), dim=1)
            np.testing.assert_allclose(vectors[i]["data"], of_tokens[1:], atol=TOLERANCE)
            vector = torch.nn.functional.normalize(hidden[0], dim=0)
            np.testing.assert_allclose(dense[i]["embedding"], vector, atol=TOLERANCE)
            expected: dict[int, float] = {}
            for token_id, weight in zip(ids[1:-1], weights[1:-1].tolist(), strict=True):
                expected[token_id] = max(weight, expected.get(token_id, 0.0))
            expected = {token_id: weight for token_id, weight in expected.items() if weight > 0}
            assert {each["index"]: each["value"] for each in sparse[i]} == pytest.approx(expected, abs=TOLERANCE)
        assert num_zero and any(sparse), "some tokens count, and others do not"
        assert post(cluster, "/embed_sparse", {"inputs": texts[0]}) == sparse[:1]
        long = " ".join(["w1 w2 w3"] * 40)
        assert "inputs has" in post(cluster, "/embed_sparse", {"inputs": long}, 400)["error"]["message"]
        cut = post(cluster, "/embed_sparse", {"inputs": f"w9 {long}", "truncate": True})
        assert cut != post(
            cluster, "/embed_sparse", {"inputs": f"w9 {long}", "truncate": True, "truncation_direction": "Left"}
        )
        refused = post(cluster, "/pooling", {"input": "w1", "task": "classify"}, 400)
        assert "does embed, token_embed, token_classify" in refused["error"]["message"]
