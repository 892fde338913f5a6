"""What clients of a running cluster may rely on: text, sampling, cancelling, errors, and no leaks."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from transformers import AutoTokenizer

from services.common.config import EMBEDDED_MODEL
from services.pb import gateway_pb2
from tests.support.cluster import Cluster, request
from tests.support.examples import examples

INVALID = grpc.StatusCode.INVALID_ARGUMENT
MAX_GROWTH_BYTES = 16 * 2**20  # of a worker's memory over many requests; the allocator alone takes half of it
MAX_ROUNDS = 8  # on a busy machine a long request may end before the next line of a test runs


def test_the_text_is_that_of_the_decoded_tokens(cluster: Cluster) -> None:
    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED_MODEL)
    answer = cluster.generate("San Francisco is a", 7)
    assert answer.text == " city in Northern California that is known"
    assert answer.finish.reason == gateway_pb2.FINISH_REASON_LENGTH
    assert tokenizer.decode(tokenizer("San Francisco is a").input_ids + answer.token_ids).endswith(
        "San Francisco is a city in Northern California that is known"
    )


def test_unary_and_streamed_answers_are_equal(cluster: Cluster) -> None:
    streamed = cluster.generate("The capital of", 40)
    [whole] = cluster.gateway.Generate(request("The capital of", 40)).completions
    assert (whole.text, list(whole.token_ids)) == (streamed.text, streamed.token_ids)


def test_a_seeded_request_gives_the_same_tokens_alone_and_in_a_crowd(cluster: Cluster) -> None:
    options = {"temperature": 1.3, "top_p": 0.95, "seed": 11, "repetition_penalty": 1.1}
    alone = cluster.generate("Tell me", 60, **options)
    with ThreadPoolExecutor(12) as threads:
        crowd = [threads.submit(cluster.generate, f"Crowd {i}", 80, temperature=1.0) for i in range(11)]
        again = threads.submit(cluster.generate, "Tell me", 60, **options).result()
        other = threads.submit(cluster.generate, "Tell me", 60, **options | {"seed": 12}).result()
        assert all(len(answer.result().token_ids) <= 80 for answer in crowd)
    assert again.token_ids == alone.token_ids
    assert other.token_ids != alone.token_ids


def test_an_unseeded_request_reports_the_seed_that_reproduces_it(cluster: Cluster) -> None:
    first = cluster.generate("Once", 30, temperature=1.5)
    again = cluster.generate("Once", 30, temperature=1.5, seed=first.finish.seed)
    assert again.token_ids == first.token_ids


def test_min_tokens_delays_eos(cluster: Cluster) -> None:
    chat = gateway_pb2.Chat(messages=[gateway_pb2.ChatMessage(role="user", content="Hello!")])
    message = request([], 200)
    message.ClearField("prompt_token_ids")
    message.chat.CopyFrom(chat)
    [plain] = cluster.gateway.Generate(message).completions
    assert plain.finish.reason == gateway_pb2.FINISH_REASON_STOP
    message.sampling.min_tokens = len(plain.token_ids) + 20
    [longer] = cluster.gateway.Generate(message).completions
    assert len(longer.token_ids) >= message.sampling.min_tokens
    assert list(longer.token_ids)[: len(plain.token_ids) - 1] == list(plain.token_ids)[:-1]


def test_a_late_short_request_ends_before_an_early_long_one(cluster: Cluster) -> None:
    """On a busy machine the long one may be over before the short one is sent. Then it is tried again."""
    ends = [ends_of_a_long_and_a_short_request(cluster)]
    while len(ends) < MAX_ROUNDS and ends[-1] != ["short", "long goes on"]:
        ends.append(ends_of_a_long_and_a_short_request(cluster))
    assert ends[-1] == ["short", "long goes on"], ends


def ends_of_a_long_and_a_short_request(cluster: Cluster) -> list[str]:
    """What ends first. A long one that still runs when the short one has ended is cancelled."""
    ends: list[str] = []
    long_started, is_short_over = threading.Event(), threading.Event()
    call = cluster.gateway.GenerateStream(request("Count", 1500, ignore_eos=True))

    def run_long() -> None:
        for chunk in call:
            long_started.set()
            if chunk.HasField("finish"):
                ends.append("long")
            elif is_short_over.is_set():  # the rest would only take time
                ends.append("long goes on")
                call.cancel()
                return

    thread = threading.Thread(target=run_long)
    thread.start()
    assert long_started.wait(30)
    cluster.generate("Hi", 3)
    ends.append("short")
    is_short_over.set()
    thread.join(60)
    cluster.wait_idle()
    return ends


def test_a_cancelled_request_frees_its_blocks(cluster: Cluster) -> None:
    def cancel(call: Any) -> bool:
        """Whether the request ran just before."""
        next(call)
        is_running = cluster.attention_status().num_sequences == 1
        call.cancel()
        return is_running

    assert any(ends_early(cluster, cancel, timeout_s=60.0) for _ in range(MAX_ROUNDS)), "it ran to its end"


def test_a_deadline_frees_the_request_too(cluster: Cluster) -> None:
    def read(call: Any) -> bool:
        """Whether there was time for its first token."""
        num_chunks = 0
        with pytest.raises(grpc.RpcError) as error:
            for _ in call:
                num_chunks += 1
        assert error.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        return num_chunks > 0

    assert any(ends_early(cluster, read, timeout_s=0.3) for _ in range(MAX_ROUNDS)), "it ran to its end"


def ends_early(cluster: Cluster, read: Callable[[Any], bool], timeout_s: float) -> bool:
    """Whether a long request has begun, as `read` says, and was not computed to its end.

    All its blocks must be free afterwards. A busy machine may let it end, or not begin, before it is ended.
    """
    before = cluster.wait_idle().num_computed_tokens
    has_run = read(cluster.gateway.GenerateStream(request("Count", 1900, ignore_eos=True), timeout=timeout_s))
    return has_run and cluster.wait_idle().num_computed_tokens - before < 1900


NAN, INF = float("nan"), float("inf")
BAD_REQUESTS = {
    "prompt too long": (request([5] * 3000, 5), "3000", "2048"),
    "prompt and output too long": (request([5] * 100, 2000, min_tokens=2000), "2100", "2048"),
    "empty prompt": (request("", 5), "prompt", ""),
    "no tokens": (request([], 5), "prompt", ""),
    "no input": (gateway_pb2.GenerateRequest(max_tokens=5), "prompt", ""),
    "max_tokens zero": (request("a", 0), "max_tokens is 0", "1"),
    "max_tokens negative": (request("a", -3), "max_tokens is -3", "1"),
    "token id too large": (request([5, 1024], 5), "1024", "vocab"),
    "token id negative": (request([5, -1], 5), "-1", "vocab"),
    "temperature nan": (request("a", 5, temperature=NAN), "temperature", "nan"),
    "temperature infinite": (request("a", 5, temperature=INF), "temperature", "inf"),
    "temperature negative": (request("a", 5, temperature=-1), "temperature", "-1"),
    "top_p zero": (request("a", 5, top_p=0), "top_p", "0"),
    "top_p nan": (request("a", 5, top_p=NAN), "top_p", "nan"),
    "top_k zero": (request("a", 5, top_k=0), "top_k", "0"),
    "min_p above one": (request("a", 5, min_p=1.5), "min_p", "1.5"),
    "repetition penalty zero": (request("a", 5, repetition_penalty=0), "repetition_penalty", "0"),
    "presence penalty": (request("a", 5, presence_penalty=3), "presence_penalty", "3"),
    "frequency penalty": (request("a", 5, frequency_penalty=-3), "frequency_penalty", "-3"),
    "min_tokens above max_tokens": (request("a", 5, min_tokens=6), "min_tokens", "6"),
    "empty stop string": (request("a", 5, stop=[""]), "stop", ""),
    "too many stop strings": (request("a", 5, stop=[str(i) for i in range(17)]), "17", "16"),
    "stop token out of range": (request("a", 5, stop_token_ids=[9999]), "9999", ""),
    "empty chat": (gateway_pb2.GenerateRequest(chat=gateway_pb2.Chat(), max_tokens=5), "messages", ""),
}


@pytest.mark.parametrize("name", BAD_REQUESTS)
def test_bad_input_names_value_and_limit_while_a_stream_goes_on(cluster: Cluster, name: str) -> None:
    message, value, limit = BAD_REQUESTS[name]
    stream = cluster.gateway.GenerateStream(request("Count", 20, ignore_eos=True))
    num_received = len(next(stream).token_ids)
    with pytest.raises(grpc.RpcError) as error:
        cluster.gateway.Generate(message)
    assert error.value.code() is INVALID
    assert value in error.value.details() and limit in error.value.details()
    num_received += sum(len(chunk.token_ids) for chunk in stream)
    assert num_received == 20, "the other stream was disturbed"


def test_health_and_reflection_answer_on_all_three_services(cluster: Cluster, tmp_path: Path) -> None:
    names = {
        "gateway": "twostroke.v1.Gateway",
        "dense": "twostroke.dense.v1.DenseWorker",
        "attention": "twostroke.attn.v1.AttentionWorker",
    }
    directory = cluster.log_file.parent
    for socket, service in names.items():
        with grpc.insecure_channel(f"unix:{directory}/{socket}.sock") as channel:
            status = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=service))
            assert status.status == health_pb2.HealthCheckResponse.SERVING
            question = reflection_pb2.ServerReflectionRequest(list_services="")
            answer = next(
                reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(iter([question]))
            )
            assert service in {entry.name for entry in answer.list_services_response.service}


def test_one_request_id_is_logged_by_all_three_services(cluster: Cluster) -> None:
    cluster.generate("Hello", 4, request_id="find-me-everywhere")
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        lines = [line for line in cluster.log_file.read_text().splitlines() if "find-me-everywhere" in line]
        services = {word for line in lines for word in line.split() if word.startswith("service=")}
        if services == {"service=gateway", "service=dense_worker", "service=attn_worker"}:
            return
        time.sleep(0.05)
    raise AssertionError(f"the request id was logged by {services} only")


@pytest.mark.timeout(600)
def test_many_requests_with_random_cancels_leak_nothing(cluster: Cluster) -> None:
    """Ten thousand in `make chaos`, where the limit is 2 KiB for each.

    The prefix cache keeps each new block of tokens, 64 KiB, and would go on growing up to 256 MiB. With a seed of its
    own each prompt has one answer, so that nearly all blocks are there before the memory is first read.
    """
    num_first, num_more = examples(2000, 100), examples(8000, 250)
    rng = random.Random(3)
    prompts = [f"Request {i} of many" for i in range(200)]

    def run(number: int) -> None:
        options = {"temperature": 1.0, "seed": number % 200}
        call = cluster.gateway.GenerateStream(request(prompts[number % 200], rng.randint(1, 4), **options))
        if rng.random() < 0.2:
            call.cancel()
            return
        for _ in call:
            if rng.random() < 0.1:
                call.cancel()
                return

    def run_many(count: int) -> None:
        with ThreadPoolExecutor(32) as threads:
            list(threads.map(run, range(count)))

    run_many(num_first)  # caches and pools grow to their final size
    before = cluster.wait_idle(), cluster.dense_status()
    run_many(num_more)
    after = cluster.wait_idle(), cluster.dense_status()
    for first, last in zip(before, after, strict=True):
        growth = last.resident_bytes - first.resident_bytes
        assert growth < MAX_GROWTH_BYTES, f"memory grew by {growth} bytes over {num_more} requests"
