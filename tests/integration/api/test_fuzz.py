"""Generated requests over HTTP and gRPC: no 500, no crash, and nothing is left afterwards."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import grpc
import httpx2
import hypothesis
import pytest
import schemathesis
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.checks import (
    content_type_conformance,
    not_a_server_error,
    response_schema_conformance,
    status_code_conformance,
)

from services.common.config import EMBEDDED_MODEL
from services.pb import gateway_pb2, sampling_pb2
from tests.support.cluster import Cluster, free_port, running_cluster
from tests.support.examples import examples
from tests.support.models import TWO_LAYERS

REQUEST_TIMEOUT_S = 60.0
MODEL = EMBEDDED_MODEL.name
MAX_MODEL_LEN = 64  # so that valid requests are short
CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
# `derandomize` gives the same requests in every run, so that failures can be repeated.
FEW = hypothesis.settings(
    max_examples=examples(30, 2),  # of each operation of the document
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate, hypothesis.Phase.shrink],
)
# For requests with many options, each of which can be wrong alone.
MANY = hypothesis.settings(FEW, max_examples=examples(80, 15))
REFUSALS = {
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    limits = (TWO_LAYERS, f"model.max_model_len={MAX_MODEL_LEN}", "gateway.max_n=3", "gateway.max_prompts=4")
    directory = tmp_path_factory.mktemp("fuzz")
    with running_cluster(directory, f"gateway.http_address=127.0.0.1:{free_port()}", *limits, is_warm=True) as cluster:
        yield cluster


@pytest.fixture(autouse=True)
def nothing_is_left(cluster: Cluster) -> Iterator[None]:
    pids = [cluster.pid_of(role) for role in ("gateway", "dense_worker", "attn_worker")]
    yield
    cluster.wait_idle()
    assert [cluster.pid_of(role) for role in ("gateway", "dense_worker", "attn_worker")] == pids, "a service has died"
    assert "Traceback" not in cluster.log_file.read_text()


def operations_of(cluster: Cluster) -> list[schemathesis.APIOperation]:
    """The operations in the server's OpenAPI document."""
    document = httpx2.get(f"http://{cluster.http_address}/openapi.json", timeout=REQUEST_TIMEOUT_S).json()
    return [result.ok() for result in schemathesis.openapi.from_dict(document).get_all_operations()]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE], ids=lambda mode: mode.name.lower())
def test_requests_made_from_the_openapi_document(cluster: Cluster, mode: GenerationMode) -> None:
    url = f"http://{cluster.http_address}"
    operations = operations_of(cluster)
    assert {"/v1/completions", "/v1/chat/completions", "/tokenize", "/ready"} <= {each.path for each in operations}
    for operation in operations:
        if mode is GenerationMode.NEGATIVE and not operation.body:
            continue  # without a body no request is invalid
        if operation.path == "/invocations" and examples(2, 1) == 1:
            continue  # the body of any other route, which takes longer to make than all these together

        @FEW
        @given(case=operation.as_strategy(generation_mode=mode))
        def check(case: schemathesis.Case) -> None:
            case.call_and_validate(base_url=url, checks=CHECKS, timeout=REQUEST_TIMEOUT_S)

        check()


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("path", "good"),
    [
        ("/v1/completions", {"prompt": "hi", "max_tokens": 3}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}),
        ("/v1/responses", {"input": "hi", "max_output_tokens": 3}),
        ("/v1/messages", {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}),
    ],
)
def test_a_good_request_with_a_few_generated_fields(cluster: Cluster, path: str, good: dict[str, Any]) -> None:
    """Bodies made from the document are wrong in so many places that the server never reads most fields."""
    url = f"http://{cluster.http_address}"
    (operation,) = (each for each in operations_of(cluster) if each.path == path)
    answers: Counter[int] = Counter()

    @MANY
    @given(
        case=operation.as_strategy(generation_mode=GenerationMode.POSITIVE),
        choice=st.randoms(use_true_random=False),
    )
    def check(case: schemathesis.Case, choice: random.Random) -> None:
        made = sorted(case.body.items())
        case.body = good | dict(choice.sample(made, min(len(made), choice.randint(1, 3))))
        response = case.call_and_validate(base_url=url, checks=CHECKS, timeout=REQUEST_TIMEOUT_S)
        answers[response.status_code] += 1

    check()
    assert answers[200] > MANY.max_examples / 8, answers
    assert answers[400] > MANY.max_examples / 80, answers  # few examples have few of these, in /v1/completions


def numbers(least: int, most: int) -> st.SearchStrategy[int]:
    """Mostly small numbers, and both limits."""
    small = st.integers(max(least, -2), min(most, 5))
    return st.one_of(small, st.sampled_from((least, most)), st.integers(least, most))


INT32, INT64 = numbers(-(2**31), 2**31 - 1), numbers(-(2**63), 2**63 - 1)
UINT32, UINT64 = numbers(0, 2**32 - 1), numbers(0, 2**64 - 1)
# Text in protobuf is UTF-8, which has no surrogates.
TEXT = st.text(st.characters(codec="utf-8"), max_size=40)
FLOAT = st.floats(width=32)
DOUBLE = st.one_of(st.floats(), st.sampled_from((0.0, 0.5, 1.0, 2.0)))


def sparse(**fields: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """A few of the fields, so that not every request is wrong in ten places."""
    names = st.lists(st.sampled_from(sorted(fields)), max_size=4, unique=True)
    return names.flatmap(lambda chosen: st.fixed_dictionaries({name: fields[name] for name in chosen}))


SAMPLING = sparse(
    temperature=DOUBLE,
    top_k=INT32,
    top_p=DOUBLE,
    min_p=DOUBLE,
    repetition_penalty=DOUBLE,
    presence_penalty=DOUBLE,
    frequency_penalty=DOUBLE,
    min_tokens=INT32,
    seed=UINT64,
    logit_bias=st.dictionaries(UINT32, FLOAT, max_size=3),
    bad_words=st.lists(st.builds(sampling_pb2.TokenSequence, token_ids=st.lists(UINT32, max_size=3)), max_size=3),
    allowed_token_ids=st.lists(UINT32, max_size=3),
)
CHAT = st.builds(
    gateway_pb2.Chat,
    messages=st.lists(
        st.builds(gateway_pb2.ChatMessage, role=st.sampled_from(("user", "system", "assistant")) | TEXT, content=TEXT),
        max_size=3,
    ),
)
INPUT = st.one_of(
    st.fixed_dictionaries({"prompt": TEXT}),
    st.builds(lambda ids: {"prompt_token_ids": gateway_pb2.TokenIds(ids=ids)}, st.lists(INT64, max_size=5)),
    st.builds(lambda chat: {"chat": chat}, CHAT),
    st.just({}),
)
OPTIONS = sparse(
    request_id=TEXT,
    max_tokens=INT64,
    stop=st.lists(TEXT, max_size=3),
    stop_token_ids=st.lists(INT64, max_size=3),
    ignore_eos=st.booleans(),
    include_stop_str_in_output=st.booleans(),
    skip_special_tokens=st.booleans(),
    cache_salt=TEXT,
    model=TEXT,
    n=UINT32,
    best_of=UINT32,
    logprobs=UINT32,
    prompt_logprobs=UINT32,
    echo=st.booleans(),
    bad_words=st.lists(TEXT, max_size=3),
    priority=INT32,
    user=TEXT,
)


@pytest.mark.timeout(300)
@MANY
@given(prompt=INPUT, options=OPTIONS, sampling=SAMPLING, is_stream=st.booleans())
def test_requests_for_generation_over_grpc(
    cluster: Cluster, prompt: dict[str, Any], options: dict[str, Any], sampling: dict[str, Any], is_stream: bool
) -> None:
    message = gateway_pb2.GenerateRequest(**prompt, **options, sampling=sampling_pb2.SamplingParams(**sampling))
    try:
        if is_stream:
            list(cluster.gateway.GenerateStream(message, timeout=REQUEST_TIMEOUT_S))
        else:
            cluster.gateway.Generate(message, timeout=REQUEST_TIMEOUT_S)
    except grpc.RpcError as error:
        assert error.code() in REFUSALS, error


@FEW
@given(text=TEXT, chat=CHAT, token_ids=st.lists(UINT32, max_size=5), name=TEXT)
def test_other_requests_over_grpc(
    cluster: Cluster, text: str, chat: gateway_pb2.Chat, token_ids: list[int], name: str
) -> None:
    gateway = cluster.gateway
    for call, message in (
        (gateway.Tokenize, gateway_pb2.TokenizeRequest(text=text)),
        (gateway.Tokenize, gateway_pb2.TokenizeRequest(chat=chat)),
        (gateway.Detokenize, gateway_pb2.DetokenizeRequest(token_ids=token_ids)),
        (gateway.Abort, gateway_pb2.AbortRequest(request_id=name)),
    ):
        try:
            call(message, timeout=REQUEST_TIMEOUT_S)
        except grpc.RpcError as error:
            assert error.code() in REFUSALS, error


@FEW
@given(data=st.binary(max_size=200), method=st.sampled_from(("Generate", "GenerateStream", "Tokenize", "Abort")))
def test_bytes_that_are_not_a_message(cluster: Cluster, data: bytes, method: str) -> None:
    with grpc.insecure_channel(cluster.address) as channel:
        call = channel.unary_stream(f"/twostroke.v1.Gateway/{method}")
        try:
            list(call(data, timeout=REQUEST_TIMEOUT_S))
        except grpc.RpcError as error:
            # gRPC itself answers bytes that it cannot read.
            is_unreadable = error.code() is grpc.StatusCode.UNKNOWN and "DecodeError" in (error.details() or "")
            assert is_unreadable or error.code() in REFUSALS, error
