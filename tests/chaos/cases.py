"""Random requests of every kind for the chaos runs. Each can be sent over gRPC or HTTP, streamed or whole, and many
over Triton's gRPC.

The answer is a `Collected` over every API, so that a disturbed answer over one API can be compared with an
undisturbed one over another.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import grpc
import httpx2
import numpy as np

from services.common.config import EMBEDDED_MODEL
from services.pb import gateway_pb2, sampling_pb2, triton_pb2, triton_pb2_grpc
from tests.support.clients import inference_messages
from tests.support.clients.http_clients import socket_path
from tests.support.clients.streams import Collected
from tests.support.cluster import Cluster, request

KNOWN_PROMPT = "San Francisco is a"  # trained heads know the greedy answer
MAX_PROMPT_CHARACTERS = 1200
STOPS = (". ", " the", "\n", "not in any text")
FORMS = ("[a-z ,.]{200,2000}", r"(\d{1,3} ){50,500}end", "([A-Z][a-z]+[ ,.])+")  # of structured output
GRPC, HTTP, TRITON = ("grpc_stream", "grpc"), ("http_stream", "http"), ("triton_stream", "triton")
TRITON_PENALTIES = ("repetition_penalty", "frequency_penalty")
TRITON_SAMPLING = {"temperature", "top_p", "top_k", "seed", "structured_output", *TRITON_PENALTIES}
TIMEOUT_S = 300.0


class Cancelled(Exception):
    """Raised by a client that ends its stream early."""


def draw_messages(random: Random, count: int, max_tokens: int) -> list[gateway_pb2.GenerateRequest]:
    """Greedy and seeded, long and short requests, with all options whose state must survive a restart."""
    return [_draw_message(random, max_tokens) for _ in range(count)]


def _draw_message(random: Random, max_tokens: int) -> gateway_pb2.GenerateRequest:
    if random.random() < 0.2:
        return request(KNOWN_PROMPT, random.randint(max_tokens // 8, max_tokens), ignore_eos=random.random() < 0.8)
    text = (EMBEDDED_MODEL / "documents.txt").read_text()
    start = random.choice([0, 0, 500, random.randrange(len(text) - MAX_PROMPT_CHARACTERS)])  # many share a prefix
    options: dict[str, Any] = {"ignore_eos": random.random() < 0.8}
    if random.random() < 0.7:
        options |= {"temperature": random.uniform(0.3, 1.2), "seed": random.randrange(2**63)}
        options |= random.choice([{}, {"top_p": 0.9}, {"top_k": 40}, {"min_p": 0.05}, {"top_p": 0.8, "top_k": 20}])
    if random.random() < 0.3:
        options |= {"repetition_penalty": 1.2, "frequency_penalty": 0.3}
    if random.random() < 0.2:
        options["logit_bias"] = {random.randrange(1, 500): 2.0}
    if random.random() < 0.1:
        options["allowed_token_ids"] = random.sample(range(3, 1000), 100)
    elif random.random() < 0.2:
        options["structured_output"] = sampling_pb2.StructuredOutput(regex=random.choice(FORMS))
    if random.random() < 0.3:
        options |= {"stop": [random.choice(STOPS)], "include_stop_str_in_output": random.random() < 0.5}
    if random.random() < 0.3:
        options["n"] = random.randint(2, 3)
    if random.random() < 0.3:
        options["logprobs"] = random.randint(0, 3)
    if random.random() < 0.1:
        options["prompt_logprobs"] = random.randint(0, 2)
    if random.random() < 0.15:
        options["cache_salt"] = random.choice("ab")
    options["priority"] = random.choice([0, 0, 0, -1, 1])
    length = random.randint(20, MAX_PROMPT_CHARACTERS)
    return request(text[start : start + length], random.randint(max_tokens // 8, max_tokens), **options)


def draw_search(random: Random, max_tokens: int) -> gateway_pb2.GenerateRequest:
    """A beam search."""
    search = sampling_pb2.BeamSearch(length_penalty=random.choice([0.0, 1.0]))
    prompt = "".join(random.choice("abcde ") for _ in range(random.randint(20, MAX_PROMPT_CHARACTERS // 4)))
    return request(prompt, random.randint(max_tokens // 8, max_tokens // 2), best_of=3, n=2, beam_search=search)


def transports(message: gateway_pb2.GenerateRequest) -> list[str]:
    """Over which APIs a message can be sent: only gRPC has all options."""
    found = [*GRPC]
    if message.HasField("beam_search"):
        return found
    if not message.HasField("prompt_logprobs"):
        found += HTTP
    sampling = {field.name for field, _ in message.sampling.ListFields()}
    if sampling <= TRITON_SAMPLING and not message.include_stop_str_in_output:
        found += TRITON
    return found


def seen_over(transport: str, answer: Collected) -> Collected:
    """The part of an answer that an API reports: the model `ensemble` of Triton has only texts."""
    return Collected(text=answer.text) if transport in TRITON else answer


def send(
    cluster: Cluster,
    message: gateway_pb2.GenerateRequest,
    transport: str,
    on_chunk: Callable[[], None] = lambda: None,
) -> Collected:
    """The answer. `on_chunk` is called after each chunk; if it raises `Cancelled`, the answer ends with that chunk."""
    collected = Collected()
    kind, _, is_streamed = transport.partition("_")
    if kind == "grpc":
        _send_grpc(cluster, message, collected, on_chunk if is_streamed else None)
    elif kind == "triton":
        _send_triton(cluster, message, collected, on_chunk if is_streamed else None)
    else:
        _send_http(cluster, message, collected, on_chunk if is_streamed else None)
    return collected


def _send_grpc(
    cluster: Cluster,
    message: gateway_pb2.GenerateRequest,
    collected: Collected,
    on_chunk: Callable[[], None] | None,
) -> None:
    if on_chunk is None:
        response = cluster.gateway.Generate(message, timeout=TIMEOUT_S)
        for completion in response.completions:
            _add_grpc(collected, completion)
        _add_prompt(collected, 0, response.prompt)  # a stream reports them with answer 0, too
        return
    call = cluster.gateway.GenerateStream(message, timeout=TIMEOUT_S)
    try:
        for chunk in call:
            assert chunk.index not in collected.reasons, "nothing may follow the finish"
            _add_grpc(collected, chunk)
            _add_prompt(collected, chunk.index, chunk.prompt)
            on_chunk()
    except Cancelled:
        call.cancel()
        with contextlib.suppress(grpc.RpcError):
            list(call)


def _add_grpc(collected: Collected, part: gateway_pb2.GenerateChunk | gateway_pb2.Completion) -> None:
    finish = (part.finish.reason, part.finish.stop_string) if part.HasField("finish") else None
    _add(collected, part.index, part.token_ids, part.text, [each.logprob for each in part.logprobs], finish)


def _add_prompt(collected: Collected, index: int, prompt: gateway_pb2.PromptEcho) -> None:
    if prompt.logprobs:
        collected.prompt_logprobs[index] += [each.logprob for each in prompt.logprobs]


def _send_triton(
    cluster: Cluster,
    message: gateway_pb2.GenerateRequest,
    collected: Collected,
    on_chunk: Callable[[], None] | None,
) -> None:
    asked = inference_messages.message("ensemble", _triton_inputs(message, is_streamed=on_chunk is not None))
    with grpc.insecure_channel(cluster.address) as channel:
        stub = triton_pb2_grpc.GRPCInferenceServiceStub(channel)
        if on_chunk is None:
            _add_triton(collected, stub.ModelInfer(asked, timeout=TIMEOUT_S))
            return
        call = stub.ModelStreamInfer(iter([asked]), timeout=TIMEOUT_S)
        is_last = False
        try:
            for each in call:
                assert not each.error_message and not is_last, each
                is_last = each.infer_response.parameters["triton_final_response"].bool_param
                if each.infer_response.outputs:
                    _add_triton(collected, each.infer_response)
                on_chunk()
            assert is_last, "the stream broke off"
        except Cancelled:
            call.cancel()
            with contextlib.suppress(grpc.RpcError):
                list(call)


def _triton_inputs(message: gateway_pb2.GenerateRequest, *, is_streamed: bool) -> dict[str, np.ndarray]:
    sampling = message.sampling
    values: dict[str, Any] = {
        "text_input": inference_messages.texts([message.prompt]),
        "max_tokens": inference_messages.int32([message.max_tokens]),
        "stream": np.array([[is_streamed]]),
        "exclude_input_in_output": np.array([[True]]),
    }
    if sampling.temperature:  # without top_k and top_p Triton takes the most likely token
        values["temperature"] = np.array([[sampling.temperature]], np.float32)
        values["top_p"] = np.array([[sampling.top_p if sampling.HasField("top_p") else 1.0]], np.float32)
        values["random_seed"] = np.array([[sampling.seed]], np.uint64)
        if sampling.HasField("top_k"):
            values["top_k"] = inference_messages.int32([sampling.top_k])
    for name in TRITON_PENALTIES:
        if sampling.HasField(name):
            values[name] = np.array([[getattr(sampling, name)]], np.float32)
    if sampling.HasField("structured_output"):
        values["guided_decoding_guide_type"] = inference_messages.texts(["regex"])
        values["guided_decoding_guide"] = inference_messages.texts([sampling.structured_output.regex])
    if message.ignore_eos:
        values["end_id"] = inference_messages.int32([-1])
    if message.stop:
        values["stop_words"] = inference_messages.texts(list(message.stop))
    if message.HasField("n"):
        values["num_return_sequences"] = inference_messages.int32([message.n])
    return values


def _add_triton(collected: Collected, response: triton_pb2.ModelInferResponse) -> None:
    texts = inference_messages.output(response, "text_output")
    indexes = inference_messages.output(response, "sequence_index").ravel().tolist()
    for index, text in zip(indexes, texts, strict=True):
        collected.text[index] += text


def _send_http(
    cluster: Cluster,
    message: gateway_pb2.GenerateRequest,
    collected: Collected,
    on_chunk: Callable[[], None] | None,
) -> None:
    transport = httpx2.HTTPTransport(uds=socket_path(cluster.http_address))
    body = _http_body(message) | {"stream": on_chunk is not None}
    with httpx2.Client(transport=transport, base_url="http://gateway", timeout=TIMEOUT_S) as client:
        if on_chunk is None:
            response = client.post("/v1/completions", json=body)
            assert response.status_code == 200, response.text
            _add_http(collected, response.json())
            return
        with client.stream("POST", "/v1/completions", json=body) as response:
            assert response.status_code == 200, response.read()
            with contextlib.suppress(Cancelled):
                for event in _events(response):
                    _add_http(collected, event)
                    on_chunk()


def _events(response: httpx2.Response) -> Iterator[Any]:
    for line in response.iter_lines():
        if line == "data: [DONE]":
            return
        if line:
            yield json.loads(line.removeprefix("data: "))
    raise AssertionError("the stream of events broke off")


def _add_http(collected: Collected, answer: Any) -> None:
    assert "error" not in answer, answer
    reasons = {"stop": gateway_pb2.FINISH_REASON_STOP, "length": gateway_pb2.FINISH_REASON_LENGTH}
    for choice in answer["choices"]:
        finish = None
        if choice["finish_reason"] is not None:
            stop = choice.get("stop_reason")
            finish = (reasons[choice["finish_reason"]], stop if isinstance(stop, str) else "")
        logprobs = (choice["logprobs"] or {}).get("token_logprobs", [])
        _add(collected, choice["index"], choice.get("token_ids", []), choice["text"], logprobs, finish)


def _http_body(message: gateway_pb2.GenerateRequest) -> dict[str, Any]:
    sampling = {
        field.name: list(value) if field.name == "allowed_token_ids" else value
        for field, value in message.sampling.ListFields()
        if field.name not in ("logit_bias", "structured_output")
    }
    body = {"prompt": message.prompt, "max_tokens": message.max_tokens, "return_token_ids": True, **sampling}
    if message.sampling.logit_bias:
        body["logit_bias"] = {str(key): value for key, value in message.sampling.logit_bias.items()}
    if message.sampling.HasField("structured_output"):
        body["structured_outputs"] = {"regex": message.sampling.structured_output.regex}
    if message.stop:
        body["stop"] = list(message.stop)
    for name in ("n", "logprobs"):
        if message.HasField(name):
            body[name] = getattr(message, name)
    names = ("ignore_eos", "include_stop_str_in_output", "priority", "cache_salt")
    return body | {name: getattr(message, name) for name in names if getattr(message, name)}


def _add(
    collected: Collected,
    index: int,
    token_ids: Any,
    text: str,
    logprobs: list[float],
    finish: tuple[int, str] | None,
) -> None:
    collected.token_ids[index] += token_ids
    collected.text[index] += text
    if logprobs:
        collected.logprobs[index] += logprobs
    if finish is not None:
        collected.reasons[index] = finish
