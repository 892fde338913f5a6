"""Small requests, within all limits or just beyond them, that are expensive: they must not slow other clients."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from google.protobuf.message import Message

from services.common.config import GatewaySection
from services.gateway.http.envelope import MAX_BODY_BYTES
from services.pb import gateway_pb2, triton_pb2
from tests.support.clients.http_clients import client, connect_socket, request_bytes
from tests.support.clients.wire_format import field, repeated
from tests.support.cluster import REQUEST_TIMEOUT_S, Cluster, running_cluster
from tests.support.expensive_bodies import COUNT, EXPENSIVE, GENERATE, INFER, MESSAGES, RESPONSES, encoded
from tests.support.models import ONE_LAYER
from tests.support.undisturbed import assert_undisturbed

PATH = "/v1/completions"
MESSAGE_BYTES = GatewaySection().max_message_bytes - 64  # leaves room for the fields around it
STOP = [f"{i:02}" + chr(ord("a") + i) * 254 for i in range(16)]
MAX_GROWTH_BYTES = 160 * 2**20  # the allocator keeps some memory of large answers


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, on_one_core: tuple[str, ...]) -> Iterator[Cluster]:
    # The gateway is under test. Steps are short, because a step with many prompt tokens would delay other clients, too.
    overrides = (ONE_LAYER, "scheduler.max_num_batched_tokens=256")
    directory = tmp_path_factory.mktemp("expensive")
    with running_cluster(directory, *overrides, wrapper=on_one_core, is_warm=True) as cluster:
        yield cluster
        cluster.wait_idle()


@pytest.mark.parametrize(
    ("body", "num_choices"),
    [
        ({"prompt": ["a"] * 64, "n": 4, "stop": STOP, "max_tokens": 2}, 256),
        ({"prompt": ["word " * 450] * 4, "n": 16, "prompt_logprobs": 20, "max_tokens": 1}, 64),
        ({"prompt": ["word " * 100] * 4, "n": 16, "logprobs": 20, "echo": True, "max_tokens": 1}, 64),
        ({"prompt": [[7] * 2000] * 64, "max_tokens": 1}, 64),
    ],
    ids=["stop strings", "prompt_logprobs", "echo", "token ids"],
)
def test_many_answers(cluster: Cluster, body: dict[str, Any], num_choices: int) -> None:
    def attack() -> None:
        with client(cluster.http_address) as http:
            response = http.post(PATH, json=body)
            assert response.status_code == 200, response.text[:500]
            assert len(response.json()["choices"]) == num_choices

    assert_undisturbed(cluster, attack, max_growth_bytes=MAX_GROWTH_BYTES)


EVERY_TOKEN = {str(i): 0.5 for i in range(1024)}
LISTS: dict[str, tuple[dict[str, Any], str | None]] = {  # with the field that is refused; None: none
    "a bias for every token": ({"prompt": ["a"] * 4, "n": 16, "max_tokens": 20, "logit_bias": EVERY_TOKEN}, None),
    "60,000 biases": ({"prompt": "a", "logit_bias": {str(i): 1 for i in range(60_000)}}, "logit_bias"),
    "10,000 stop strings": ({"prompt": "a", "stop": [f"{i}x" for i in range(10_000)]}, "stop"),
    "10,000 stop tokens": ({"prompt": "a", "stop_token_ids": list(range(10_000))}, "stop_token_ids"),
    "10,000 bad words": ({"prompt": "a", "bad_words": [f"{i}x" for i in range(10_000)]}, "bad_words"),
    "100,000 allowed tokens": ({"prompt": "a", "allowed_token_ids": list(range(1024)) * 100}, "allowed_token_ids"),
}


def test_long_lists_of_options(cluster: Cluster) -> None:
    def attack() -> None:
        with client(cluster.http_address) as http:
            for name, (body, param) in LISTS.items():
                response = http.post(PATH, json=body)
                if param is None:
                    assert response.status_code == 200, (name, response.text[:500])
                else:
                    assert (response.status_code, response.json()["error"]["param"]) == (400, param), name

    assert_undisturbed(cluster, attack)


def test_streams_that_nobody_reads(cluster: Cluster) -> None:
    """Each ends by itself: what a client has not read waits in the buffers of its connection."""
    body = {"prompt": "San Francisco is", "max_tokens": 20, "ignore_eos": True, "stream": True}

    def attack() -> None:
        connections = [connect_socket(cluster.http_address) for _ in range(300)]
        try:
            for connection in connections:
                connection.sendall(request_bytes(PATH, body))
            for connection in connections:
                received = b""
                while b"[DONE]" not in received:  # the first one is read when all have been sent
                    received += connection.recv(2**16) or pytest.fail(f"the stream was cut: {received[-500:]!r}")
        finally:
            for connection in connections:
                connection.close()

    assert_undisturbed(cluster, attack)


def test_too_many_answers(cluster: Cluster) -> None:
    def attack() -> None:
        with client(cluster.http_address) as http:
            for _ in range(3):
                response = http.post(PATH, json={"prompt": ["a"] * 64, "n": 16, "stop": STOP})
                assert (response.status_code, response.json()["error"]["param"]) == (400, "n")

    assert_undisturbed(cluster, attack)


REQUEST: type[Message] = gateway_pb2.GenerateRequest


INFERENCE: type[Message] = triton_pb2.ModelInferRequest
ENSEMBLE = field(INFERENCE, "model_name", b"ensemble")
METHODS: dict[str, dict[str, bytes]] = {  # with messages
    "/twostroke.v1.Gateway/Generate": {
        "bad_words": repeated(REQUEST, "bad_words", b"", MESSAGE_BYTES),
        "stop": repeated(REQUEST, "stop", b"", MESSAGE_BYTES),
        "chat": field(REQUEST, "chat", repeated(gateway_pb2.Chat, "messages", b"", MESSAGE_BYTES)),
        "prompt": field(REQUEST, "prompt_token_ids", field(gateway_pb2.TokenIds, "ids", b"\x01" * MESSAGE_BYTES)),
    },
    "/inference.GRPCInferenceService/ModelInfer": {
        "tensors": ENSEMBLE + repeated(INFERENCE, "inputs", b"", MESSAGE_BYTES),
        "contents": ENSEMBLE + repeated(INFERENCE, "raw_input_contents", b"", MESSAGE_BYTES),
        "dimensions": ENSEMBLE
        + field(INFERENCE, "inputs", field(INFERENCE.InferInputTensor, "shape", b"\x01" * (MESSAGE_BYTES - 64))),
    },
}


@pytest.mark.parametrize("method", METHODS)
def test_a_million_empty_elements(cluster: Cluster, method: str) -> None:
    def attack() -> None:
        with grpc.insecure_channel(cluster.address) as channel:
            for name, message in METHODS[method].items():
                with pytest.raises(grpc.RpcError) as refused:
                    channel.unary_unary(method)(message, timeout=REQUEST_TIMEOUT_S)
                assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT, name

    assert_undisturbed(cluster, attack)


GROUPS = {
    "tools": [name for name in EXPENSIVE if "tools" in name],
    "conversations": [
        name for name in EXPENSIVE if EXPENSIVE[name][0] in (MESSAGES, RESPONSES) and "tools" not in name
    ],
    "counts": [name for name in EXPENSIVE if EXPENSIVE[name][0] == COUNT],
    "inference": [name for name in EXPENSIVE if EXPENSIVE[name][0] in (GENERATE, INFER)],
}


@pytest.mark.parametrize("names", GROUPS.values(), ids=GROUPS)
def test_bodies_of_the_newer_protocols(cluster: Cluster, names: list[str]) -> None:
    assert names and sum(map(len, GROUPS.values())) == len(EXPENSIVE)
    bodies = [(name, EXPENSIVE[name][0], encoded(EXPENSIVE[name][1]), EXPENSIVE[name][2]) for name in names]

    def attack() -> None:
        with client(cluster.http_address) as http:
            for name, path, body, status in bodies:
                response = http.post(path, content=body, headers={"content-type": "application/json"})
                assert response.status_code == status, (name, response.text[:500])

    assert_undisturbed(cluster, attack, max_growth_bytes=MAX_GROWTH_BYTES)


BODY_BYTES = MAX_BODY_BYTES - 64
BODIES = {
    "empty lists": ("/v1/completions", '{"prompt":[%s[]]}' % ("[]," * (BODY_BYTES // 3 - 8)), 413),
    "keys": ("/v1/completions", "{" + ",".join(f'"{i:x}":1' for i in range(175_000)) + "}", 413),
    "one-digit ids": ("/v1/completions", '{"prompt":[%s1]}' % ("1," * (BODY_BYTES // 2 - 8)), 413),
    "as many ids as may be": ("/v1/completions", '{"prompt":[%s1]}' % ("1," * 399_999), 400),
    "an id at the end that is none": ("/detokenize", '{"tokens":[%s""]}' % ("1," * 399_990), 400),
    "parts": (
        "/v1/chat/completions",
        json.dumps({"messages": [{"role": "user", "content": [{"type": "text", "text": ""}] * 1000}] * 12}),
        400,
    ),
    "a text of quotes": ("/v1/completions", '{"prompt":"%s"}' % ('\\"' * (BODY_BYTES // 2 - 8)), 400),
}


@pytest.mark.parametrize(("path", "body", "status"), BODIES.values(), ids=BODIES)
def test_bodies_of_many_elements(cluster: Cluster, path: str, body: str, status: int) -> None:
    def attack() -> None:
        with client(cluster.http_address) as http:
            for _ in range(3):
                response = http.post(path, content=body, headers={"content-type": "application/json"})
                assert response.status_code == status, response.text[:500]

    assert len(body) <= MAX_BODY_BYTES
    assert_undisturbed(cluster, attack)


def test_too_many_log_probabilities(cluster: Cluster) -> None:
    def attack() -> None:
        with client(cluster.http_address) as http:
            response = http.post(PATH, json={"prompt": ["a"] * 16, "n": 16, "max_tokens": 1000, "logprobs": 20})
            assert (response.status_code, response.json()["error"]["param"]) == (400, "logprobs")

    assert_undisturbed(cluster, attack)
