"""Clients of other projects get the vectors and ranks that gRPC gives."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from services.pb import gateway_pb2
from tests.clients.environments import Environment
from tests.clients.test_clients import MODEL, PROGRAMS, needs, run
from tests.support.cluster import REQUEST_TIMEOUT_S, Cluster, free_port, running_cluster

TEXTS = ["What is the capital of France?", "Paris is a city.", "San Francisco is a", "a"]
CLIENTS = {  # the group of each program
    "vectors_with_openai.py": "agents",
    "vectors_with_langchain.py": "agents",
    "vectors_with_litellm.py": "litellm",
    "vectors_with_haystack.py": "vectors",
    "vectors_with_cohere.py": "vectors",
    "vectors_with_ollama.py": "ollama",
    "ranks_with_cohere.py": "vectors",
}
TOLERANCE = 1e-6


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    settings = (f"gateway.http_address=127.0.0.1:{free_port()}", "model.runner=pooling")
    with running_cluster(tmp_path_factory.mktemp("vectors"), *settings) as cluster:
        yield cluster


@pytest.mark.parametrize("file", [pytest.param(each, marks=needs(group)) for each, group in CLIENTS.items()])
def test_a_client_gets_the_vectors_of_grpc(file: str, cluster: Cluster) -> None:
    python = Environment(CLIENTS[file]).program("python")
    got = json.loads(run([python, str(PROGRAMS / file), f"http://{cluster.http_address}/v1", MODEL, *TEXTS]))
    assert got
    inputs = [gateway_pb2.EmbedInput(text=text) for text in TEXTS]
    answer = cluster.gateway.Embed(gateway_pb2.EmbedRequest(inputs=inputs), timeout=REQUEST_TIMEOUT_S)
    vectors = [list(each.values) for each in answer.vectors]
    for found, wanted in zip(got.get("vectors", ()), vectors, strict="vectors" in got):
        assert found == pytest.approx(wanted, abs=TOLERANCE)
    assert got.get("query", vectors[0]) == pytest.approx(vectors[0], abs=TOLERANCE)
    pairs = [gateway_pb2.TextPair(first=TEXTS[0], second=text) for text in TEXTS[1:]]
    scores = list(cluster.gateway.Score(gateway_pb2.ScoreRequest(pairs=pairs), timeout=REQUEST_TIMEOUT_S).scores)
    order = sorted(range(3), key=lambda i: -scores[i])
    for name in ("ranks", "ranks_of_v2"):
        if name in got:
            assert [index for index, _ in got[name]] == order
            assert [score for _, score in got[name]] == pytest.approx([scores[i] for i in order], abs=TOLERANCE)
