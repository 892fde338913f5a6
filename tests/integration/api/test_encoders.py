"""A cross-encoder of BERT's form, served by two processes: it needs no attention worker."""

from __future__ import annotations

import concurrent.futures
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx2
import pytest
import torch
from transformers import PreTrainedTokenizerFast

from tests.support.clients.interrupted import over_a_kill
from tests.support.cluster import (
    REQUEST_TIMEOUT_S,
    Cluster,
    children_of,
    ctl,
    free_port,
    running_cluster,
    runs_role,
)
from tests.support.encoders import SIZES, WORDS, add_tokenizer, make_encoder

TOLERANCE = 1e-5


@dataclass
class Served:
    cluster: Cluster
    model: torch.nn.Module
    tokenizer: PreTrainedTokenizerFast

    def post(self, path: str, body: dict[str, Any], status: int = 200) -> Any:
        url = f"http://{self.cluster.http_address}{path}"
        response = httpx2.post(url, json=body, timeout=REQUEST_TIMEOUT_S)
        assert response.status_code == status, response.text
        return response.json()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    path = tmp_path_factory.mktemp("bert")
    model, tokenizer = make_encoder(path, "bert", SIZES, num_labels=1), add_tokenizer(path)
    settings = (f"model.path={path}", f"gateway.http_address=127.0.0.1:{free_port()}", "model.name=bert")
    with running_cluster(tmp_path_factory.mktemp("encoder"), *settings, is_warm=True) as cluster:
        yield Served(cluster, model, tokenizer)


def test_there_is_no_attention_worker(served: Served) -> None:
    pids = children_of(served.cluster.process.pid)
    assert pids and not any(runs_role(pid, "attn_worker") for pid in pids)


@torch.inference_mode()
def wanted(served: Served, *texts: str) -> torch.Tensor:
    """transformers' values of the labels of a text or a pair."""
    return served.model(**served.tokenizer(*texts, return_tensors="pt")).logits[0]


def test_probabilities_are_those_of_transformers(served: Served) -> None:
    texts = ["w1 w2 w3", "w4", " ".join(WORDS[:60]), "unknown words", ""]
    answer = served.post("/classify", {"input": texts})
    probs = torch.stack([wanted(served, text).sigmoid() for text in texts])
    torch.testing.assert_close(torch.tensor([each["probs"] for each in answer["data"]]), probs, rtol=0, atol=TOLERANCE)
    assert {each["label"] for each in answer["data"]} == {"LABEL_0"}
    assert answer["usage"]["prompt_tokens"] == sum(len(served.tokenizer(text).input_ids) for text in texts)
    pooled = served.post("/pooling", {"input": texts})["data"]
    torch.testing.assert_close(torch.tensor([each["data"] for each in pooled]), probs, rtol=0, atol=TOLERANCE)
    values = torch.stack([wanted(served, text) for text in texts])
    for path, field, name in (("/classify", "probs", "use_activation"), ("/pooling", "data", "activation")):
        raw = served.post(path, {"input": texts, name: False})["data"]
        torch.testing.assert_close(torch.tensor([each[field] for each in raw]), values, rtol=0, atol=TOLERANCE)


def test_a_token_may_be_asked_for_what_the_input_is(served: Served) -> None:
    """`wanted` reads the state of the first one."""
    texts = ["w1 w2 w3", "w4"]
    data = served.post("/pooling", {"input": texts, "task": "token_classify"})["data"]
    for each, text in zip(data, texts, strict=True):
        assert len(each["data"]) == len(served.tokenizer(text).input_ids) and each["data"][1] != each["data"][0]
        first = wanted(served, text).sigmoid()
        torch.testing.assert_close(torch.tensor(each["data"][0]), first, rtol=0, atol=TOLERANCE)


DOCUMENTS = ["w7 w8", "w1 w2", " ".join(WORDS[:30]), "w50", "w3 w2 w1"]


def test_scores_are_those_of_transformers_for_pairs(served: Served) -> None:
    """Which it tells apart by the types of tokens."""
    scores = [wanted(served, "w1 w9", each).sigmoid().item() for each in DOCUMENTS]
    assert max(scores) - min(scores) > 0.01
    data = served.post("/score", {"text_1": "w1 w9", "text_2": DOCUMENTS})["data"]
    assert [each["score"] for each in data] == pytest.approx(scores, abs=TOLERANCE)
    data = served.post("/v1/score", {"text_1": DOCUMENTS[:2], "text_2": DOCUMENTS[2:4]})["data"]
    by_pair = [wanted(served, *pair).sigmoid().item() for pair in zip(DOCUMENTS[:2], DOCUMENTS[2:4], strict=True)]
    assert [each["score"] for each in data] == pytest.approx(by_pair, abs=TOLERANCE)


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_documents_come_in_the_order_of_their_scores(served: Served, path: str) -> None:
    scores = {i: wanted(served, "w1 w9", each).sigmoid().item() for i, each in enumerate(DOCUMENTS)}
    order = sorted(scores, key=lambda i: -scores[i])
    documents = [DOCUMENTS[0], {"text": DOCUMENTS[1]}, *DOCUMENTS[2:]]
    found = served.post(path, {"query": "w1 w9", "documents": documents, "top_n": 3})["results"]
    assert [each["index"] for each in found] == order[:3]
    assert [each["document"]["text"] for each in found] == [DOCUMENTS[i] for i in order[:3]]
    assert [each["relevance_score"] for each in found] == pytest.approx([scores[i] for i in order[:3]], abs=TOLERANCE)
    body = {"query": "w1 w9", "documents": documents, "return_documents": False, "model": "bert"}
    assert all(each.keys() == {"index", "relevance_score"} for each in served.post(path, body)["results"])


def test_texts_are_answered_as_text_embeddings_inference_does(served: Served) -> None:
    logits = {i: wanted(served, "w1 w9", each).item() for i, each in enumerate(DOCUMENTS)}
    order = sorted(logits, key=lambda i: -logits[i])
    body = {"query": "w1 w9", "texts": DOCUMENTS, "raw_scores": True, "return_text": True, "top_n": 3}
    found = served.post("/rerank", body)
    assert [each["index"] for each in found] == order[:3]
    assert [each["score"] for each in found] == pytest.approx([logits[i] for i in order[:3]], abs=TOLERANCE)
    assert [each["text"] for each in found] == [DOCUMENTS[i] for i in order[:3]]
    found = served.post("/rerank", {"query": "w1 w9", "texts": DOCUMENTS})
    assert [each["index"] for each in found] == order and found[0].keys() == {"index", "score"}
    best = wanted(served, "w1 w9", DOCUMENTS[order[0]]).sigmoid().item()
    assert found[0]["score"] == pytest.approx(best, abs=TOLERANCE)
    assert [each["text"] for each in served.post("/", body)] == [DOCUMENTS[i] for i in order[:3]]
    predicted = served.post("/predict", {"inputs": ["w1 w9", DOCUMENTS[0]], "raw_scores": True})
    assert predicted == [{"label": "LABEL_0", "score": pytest.approx(logits[0], abs=TOLERANCE)}]
    for path in ("/predict", "/"):
        [alone], [pair] = served.post(path, {"inputs": [["w1 w9"], ["w1 w9", DOCUMENTS[0]]]})
        assert alone["score"] == pytest.approx(wanted(served, "w1 w9").sigmoid().item(), abs=TOLERANCE)
        assert pair["score"] == pytest.approx(1 / (1 + math.exp(-logits[0])), abs=TOLERANCE)
    served.post("/predict", {"inputs": ["w1", "w2", "w3"]}, 400)
    long = {"query": "w1", "texts": [" ".join([*WORDS, *WORDS])]}
    assert served.post("/rerank", long, 400)["error"]["param"] == "texts[0]"
    assert len(served.post("/rerank", long | {"truncate": True})) == 1


def test_pairs_are_cut_from_the_longer_text(served: Served) -> None:
    """As transformers does it."""
    first, second = " ".join(WORDS[:20]), " ".join(WORDS)
    encoded = served.tokenizer(first, second, truncation=True, max_length=50, return_tensors="pt")
    with torch.inference_mode():
        score = served.model(**encoded).logits.sigmoid().item()
    body = {"query": first, "documents": [second], "truncate_prompt_tokens": 50}
    [found] = served.post("/rerank", body)["results"]
    assert found["relevance_score"] == pytest.approx(score, abs=TOLERANCE)


def test_only_documents_lose_tokens_to_their_own_limit(served: Served) -> None:
    """Also where the query is longer."""
    query, documents = " ".join(WORDS[:20]), [" ".join(WORDS), "w5 w6 w7 w8 w9 w10", "w1 w2"]
    body = {"query": query, "documents": documents, "max_tokens_per_doc": 5}
    found = {each["index"]: each["relevance_score"] for each in served.post("/rerank", body)["results"]}
    scores = [wanted(served, query, " ".join(each.split()[:5])).sigmoid().item() for each in documents]
    assert [found[i] for i in range(3)] == pytest.approx(scores, abs=TOLERANCE)
    assert len({round(each, 6) for each in scores}) == 3
    many = " ".join([*WORDS, *WORDS])
    encoded = served.tokenizer(query, many, truncation="only_second", max_length=96, return_tensors="pt")
    with torch.inference_mode():
        score = served.model(**encoded).logits.sigmoid().item()
    [fitting] = served.post("/rerank", {"query": query, "documents": [many], "max_tokens_per_doc": 4096})["results"]
    assert fitting["relevance_score"] == pytest.approx(score, abs=TOLERANCE)
    error = served.post("/rerank", {"query": many, "documents": ["w1"], "max_tokens_per_doc": 4096}, 400)["error"]
    assert error["code"] == "context_length_exceeded"


def test_inputs_may_have_as_many_tokens_as_there_are_positions(served: Served) -> None:
    """Also cut ones keep the token at the end."""
    long = " ".join([*WORDS, *WORDS])
    fits = " ".join(long.split()[:94])
    for body in ({"input": fits}, {"input": long, "truncate_prompt_tokens": -1}):
        [found] = served.post("/classify", body)["data"]
        torch.testing.assert_close(
            torch.tensor(found["probs"]), wanted(served, fits).sigmoid(), rtol=0, atol=TOLERANCE
        )
    error = served.post("/classify", {"input": long}, 400)["error"]
    assert error["code"] == "context_length_exceeded" and "96" in error["message"] and "172" in error["message"]


def test_a_killed_worker_changes_nothing(served: Served) -> None:
    texts = [" ".join(WORDS[i : i + 50]) for i in range(20)] * 50
    data = over_a_kill(
        lambda: served.post("/classify", {"input": texts}),
        lambda: served.cluster.dense_status().num_steps,
        5,
        lambda: served.cluster.kill("dense_worker"),
    )["data"]
    probs = torch.stack([wanted(served, text).sigmoid() for text in texts[:20]])
    found = torch.tensor([each["probs"] for each in data])
    torch.testing.assert_close(found, probs.repeat(50, 1), rtol=0, atol=TOLERANCE)


def test_another_worker_takes_over_while_it_serves(served: Served) -> None:
    texts = [" ".join(WORDS[i : i + 9]) for i in range(20)]
    probs = torch.stack([wanted(served, text).sigmoid() for text in texts])
    with concurrent.futures.ThreadPoolExecutor() as pool:
        replaced = pool.submit(ctl, served.cluster, "replace-dense", "--set", "dense.num_threads=1")
        has_ended = False
        while not has_ended:  # and once more after it
            has_ended = replaced.done()
            data = served.post("/classify", {"input": texts})["data"]
            found = torch.tensor([each["probs"] for each in data])
            torch.testing.assert_close(found, probs, rtol=0, atol=TOLERANCE)
        assert replaced.result().returncode == 0, replaced.result().stderr


def test_what_it_is_not_made_for_is_refused_by_name(served: Served) -> None:
    for path, body, part in (
        ("/v1/completions", {"prompt": "w1"}, "generates nothing"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "w1"}]}, "generates nothing"),
        ("/v1/embeddings", {"input": "w1"}, "classifier"),
        ("/rerank", {"query": "w1", "documents": []}, "0 elements"),
        ("/rerank", {"query": "w1", "documents": [{"title": "w2"}]}, "documents[0]"),
        ("/score", {"text_1": ["w1", "w2"], "text_2": ["w1", "w2", "w3"]}, "2 texts and text_2 has 3"),
        ("/score", {"text_1": "w1", "text_2": ["w1"] * 2049}, "gateway.max_inputs"),
        ("/pooling", {"input": "w1", "task": "embed"}, "does classify, score"),
    ):
        assert part in served.post(path, body, 400)["error"]["message"]
