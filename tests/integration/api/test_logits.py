"""Logits of prompts and of generated tokens through three processes, over gRPC and Triton's protocol.

They are compared with Hugging Face's on the same weights in float32. Both sum in other orders, hence the tolerance.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator

import grpc
import httpx2
import numpy as np
import pytest
import torch

from services.common.config import EMBEDDED_MODEL
from services.pb import gateway_pb2, triton_pb2_grpc
from tests.support.clients.inference_messages import int32, message, output
from tests.support.cluster import REQUEST_TIMEOUT_S, Cluster, free_port, running_cluster
from tests.support.reference import VOCAB_SIZE, random_prompts, reference_model

TOLERANCE = 2e-3  # of logits from -30 to 30
STEP_TOKENS = 32  # so that longer prompts take several steps
ROW_BYTES = 4 * VOCAB_SIZE
STREAM_COPIES, MESSAGE_COPIES = 3, 6  # which the gateway counts for a stream, and for an answer in one message
MAX_BYTES = MESSAGE_COPIES * ROW_BYTES * 2000


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    settings = (
        f"gateway.http_address=127.0.0.1:{free_port()}",
        f"scheduler.max_num_batched_tokens={STEP_TOKENS}",
        "scheduler.max_num_seqs=8",
        f"gateway.max_held_bytes={MAX_BYTES}",
        "gateway.max_held_wait_s=0.1",
    )
    with running_cluster(tmp_path_factory.mktemp("logits"), *settings, is_warm=True) as cluster:
        yield cluster


@pytest.fixture(autouse=True)
def nothing_is_left(cluster: Cluster) -> Iterator[None]:
    yield
    cluster.wait_idle()


@torch.inference_mode()
def expected(token_ids: list[int]) -> np.ndarray:
    """The logits after each token: float32 [num_tokens, vocab_size]."""
    return reference_model(EMBEDDED_MODEL)(torch.tensor([token_ids])).logits[0].numpy()


def rows_of(logits: gateway_pb2.Logits) -> np.ndarray:
    return np.frombuffer(logits.values, "<f4").reshape(logits.num_rows, logits.vocab_size)


def ask(prompt: list[int], max_tokens: int, **options: object) -> gateway_pb2.GenerateRequest:
    fields = {"return_context_logits": True, "return_generation_logits": True, **options}
    sampling = {"seed": 5, "temperature": 2}
    return gateway_pb2.GenerateRequest(
        prompt_token_ids={"ids": prompt}, max_tokens=max_tokens, ignore_eos=True, sampling=sampling, **fields
    )


def check(prompt: list[int], context: np.ndarray, answers: list[tuple[list[int], np.ndarray]]) -> None:
    """Compares the logits of a prompt, and of its answers by their token ids."""
    for token_ids, logits in answers:
        wanted = expected([*prompt, *token_ids])
        assert context.shape == (len(prompt), VOCAB_SIZE) and logits.shape == (len(token_ids), VOCAB_SIZE)
        np.testing.assert_allclose(context, wanted[: len(prompt)], atol=TOLERANCE, rtol=0)
        np.testing.assert_allclose(logits, wanted[len(prompt) - 1 : -1], atol=TOLERANCE, rtol=0)


def test_logits_equal_those_of_transformers_whatever_the_cache_and_the_options(cluster: Cluster) -> None:
    """Each request twice: the second one finds its prompt in the prefix cache, and must compute it all the same.

    Penalties and a bias change what is sampled, not the logits that are reported.
    """
    options = {"repetition_penalty": 1.5, "logit_bias": {7: 50.0}, "temperature": 0.8, "seed": 3}
    for prompt in random_prompts(4, 100, seed=1):
        for sampling in ({"temperature": 0.0}, options):
            request = ask(prompt, 9)
            request.sampling.CopyFrom(gateway_pb2.GenerateRequest(sampling=sampling).sampling)
            response = cluster.gateway.Generate(request, timeout=REQUEST_TIMEOUT_S)
            [completion] = response.completions
            check(prompt, rows_of(response.prompt.logits), [(list(completion.token_ids), rows_of(completion.logits))])


def test_several_answers_at_once_each_with_their_own_logits(cluster: Cluster) -> None:
    prompts = random_prompts(6, 60, seed=2)
    calls = [cluster.gateway.Generate.future(ask(prompt, 12, n=2), timeout=REQUEST_TIMEOUT_S) for prompt in prompts]
    for prompt, call in zip(prompts, calls, strict=True):
        answers = [(list(each.token_ids), rows_of(each.logits)) for each in call.result().completions]
        assert len(answers) == 2 and answers[0][0] != answers[1][0]
        check(prompt, rows_of(call.result().prompt.logits), answers)


def test_who_does_not_ask_gets_none_and_each_kind_comes_alone(cluster: Cluster) -> None:
    prompt = random_prompts(1, 20, seed=3)[0]
    plain = cluster.gateway.Generate(ask(prompt, 3, return_context_logits=False, return_generation_logits=False))
    assert not plain.HasField("prompt") and not plain.completions[0].HasField("logits")
    context = cluster.gateway.Generate(ask(prompt, 0, return_generation_logits=False))
    assert not context.completions[0].HasField("logits") and not context.completions[0].token_ids
    np.testing.assert_allclose(rows_of(context.prompt.logits), expected(prompt), atol=TOLERANCE, rtol=0)
    generation = cluster.gateway.Generate(ask(prompt, 3, return_context_logits=False))
    assert not generation.HasField("prompt") and rows_of(generation.completions[0].logits).shape == (3, VOCAB_SIZE)


@pytest.mark.parametrize("role", ["dense_worker", "attn_worker"])
def test_a_stream_goes_on_after_a_worker_was_killed(cluster: Cluster, role: str) -> None:
    prompt, num_tokens = random_prompts(1, 80, seed=4)[0], 120
    token_ids, rows, context = [], [], None
    killer: threading.Thread | None = None
    for chunk in cluster.gateway.GenerateStream(ask(prompt, num_tokens), timeout=2 * REQUEST_TIMEOUT_S):
        token_ids += chunk.token_ids
        rows.append(rows_of(chunk.logits))
        if chunk.HasField("prompt"):
            assert context is None
            context = rows_of(chunk.prompt.logits)
        if len(token_ids) > 20 and killer is None:
            killer = threading.Thread(target=os.kill, args=(cluster.pid_of(role), signal.SIGKILL))
            killer.start()
    assert killer is not None and context is not None and len(token_ids) == num_tokens
    check(prompt, context, [(token_ids, np.concatenate(rows))])


def test_more_logits_than_the_limit_are_refused_by_name(cluster: Cluster) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        cluster.gateway.Generate(ask([5] * 100, 1901))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert f"{MESSAGE_COPIES * ROW_BYTES * 2001} bytes" in caught.value.details()
    assert str(MAX_BYTES) in caught.value.details()
    first = cluster.gateway.GenerateStream(ask([5] * 100, 1000, stop=["never this"]))
    next(first)
    assert STREAM_COPIES * 1100 + MESSAGE_COPIES * 1600 > MESSAGE_COPIES * 2000
    with pytest.raises(grpc.RpcError) as caught:
        cluster.gateway.Generate(ask([5] * 100, 1500))
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED and str(MAX_BYTES) in caught.value.details()
    first.cancel()
    cluster.wait_idle()
    assert cluster.gateway.Generate(ask([5] * 100, 100)).completions, "the first one's share is free again"


def test_tritons_tensors(cluster: Cluster) -> None:
    prompts, lengths = random_prompts(3, 50, seed=6), [4, 7, 2]
    longest = max(map(len, prompts))
    inputs = {
        "input_ids": int32(*[prompt + [0] * (longest - len(prompt)) for prompt in prompts]),
        "input_lengths": int32(*[[len(prompt)] for prompt in prompts]),
        "request_output_len": int32(*[[length] for length in lengths]),
        "end_id": int32([-1], [-1], [-1]),
        "return_context_logits": np.array([[True]] * 3),
        "return_generation_logits": np.array([[True]] * 3),
    }
    with grpc.insecure_channel(cluster.address, [("grpc.max_receive_message_length", -1)]) as channel:
        stub = triton_pb2_grpc.GRPCInferenceServiceStub(channel)
        response = stub.ModelInfer(message("tensorrt_llm", inputs), timeout=REQUEST_TIMEOUT_S)
        context, generation = output(response, "context_logits"), output(response, "generation_logits")
        token_ids = output(response, "output_ids")
        assert context.shape == (3, longest, VOCAB_SIZE) and generation.shape == (3, 1, 7, VOCAB_SIZE)
        for i, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
            answer = token_ids[i, 0, len(prompt) : len(prompt) + length].tolist()
            check(prompt, context[i, : len(prompt)], [(answer, generation[i, 0, :length])])
        one = {name: values[:1, : len(prompts[0])] for name, values in inputs.items()}
        one["streaming"] = np.array([[True]])
        responses = [each.infer_response for each in stub.ModelStreamInfer(iter([message("tensorrt_llm", one)]))]
        [context] = [output(each, "context_logits") for each in responses if "context_logits" in names(each)]
        answer = [token for each in responses for token in output(each, "output_ids")[0, 0].tolist()]
        generation = np.concatenate([output(each, "generation_logits")[0, 0] for each in responses])
        check(prompts[0], context[0], [(answer, generation)])


def names(response: object) -> list[str]:
    return [each.name for each in response.outputs]


def test_generate_gives_logits_as_flat_lists_up_to_a_limit(cluster: Cluster) -> None:
    url = f"http://{cluster.http_address}/v2/models/ensemble/generate"
    body = {"text_input": "San Francisco is a", "max_tokens": 3, "return_generation_logits": True}
    answer = httpx2.post(url, json=body, timeout=REQUEST_TIMEOUT_S).json()
    assert len(answer["generation_logits"]) == 3 * VOCAB_SIZE
    assert all(type(each) is float for each in answer["generation_logits"])
