"""Collects streams of every kind, so that tests can compare a disturbed run with an undisturbed one."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from services.pb import gateway_pb2, gateway_pb2_grpc
from tests.support.cluster import request

STREAM_TIMEOUT_S = 200.0  # enough on a busy machine


@dataclass
class Collected:
    """The content of a stream, by index of the answer."""

    token_ids: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    text: dict[int, str] = field(default_factory=lambda: defaultdict(str))
    reasons: dict[int, tuple[int, str]] = field(default_factory=dict)
    logprobs: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    prompt_logprobs: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))

    def assert_equals(self, expected: Collected, tolerance: float = 1e-3) -> None:
        """Tokens, texts and ends must be equal; log-probabilities may differ by rounding, or by `tolerance`."""
        assert self.token_ids == expected.token_ids
        assert self.text == expected.text
        assert self.reasons == expected.reasons
        _assert_close(self.logprobs, expected.logprobs, tolerance)
        _assert_close(self.prompt_logprobs, expected.prompt_logprobs, tolerance)


def _assert_close(found: dict[int, list[float]], expected: dict[int, list[float]], tolerance: float) -> None:
    assert found.keys() == expected.keys()
    for index, logprobs in found.items():
        assert len(logprobs) == len(expected[index])
        differences = [abs(a - b) for a, b in zip(logprobs, expected[index], strict=True)]
        assert all(each <= tolerance for each in differences), (  # which NaN is not
            f"log-probabilities of answer {index} differ by up to {max(differences)}"
        )


def collect(
    gateway: gateway_pb2_grpc.GatewayStub,
    message: gateway_pb2.GenerateRequest,
    on_chunk: Callable[[], object] = lambda: None,
) -> Collected:
    """Reads the whole stream; calls `on_chunk` after each chunk, as soon as every answer has begun."""
    collected = Collected()
    for chunk in gateway.GenerateStream(message, timeout=STREAM_TIMEOUT_S):
        assert chunk.index not in collected.reasons, "nothing may follow the finish"
        collected.token_ids[chunk.index] += chunk.token_ids
        collected.text[chunk.index] += chunk.text
        if chunk.logprobs:
            collected.logprobs[chunk.index] += [each.logprob for each in chunk.logprobs]
        if chunk.prompt.logprobs:
            collected.prompt_logprobs[chunk.index] += [each.logprob for each in chunk.prompt.logprobs]
        if chunk.HasField("finish"):
            collected.reasons[chunk.index] = (chunk.finish.reason, chunk.finish.stop_string)
        if len(collected.token_ids) >= message.n:
            on_chunk()
    return collected


def collect_all(
    gateway: gateway_pb2_grpc.GatewayStub,
    messages: Sequence[gateway_pb2.GenerateRequest],
    disturb: Callable[[], object] = lambda: None,
) -> list[Collected]:
    """Reads all streams at the same time; calls `disturb` when every answer has begun."""
    begun = [threading.Event() for _ in messages]
    with ThreadPoolExecutor(len(messages)) as threads:
        futures = [
            threads.submit(collect, gateway, message, event.set)
            for message, event in zip(messages, begun, strict=True)
        ]
        for event, future in zip(begun, futures, strict=True):
            while not event.wait(0.01) and not future.done():
                pass
        disturb()
        return [future.result() for future in futures]


def messages_of_every_kind(prompt: str, max_tokens: int, stop: str) -> list[gateway_pb2.GenerateRequest]:
    """Greedy, seeded, stop string, penalties, several answers, log-probabilities, biases, few allowed tokens."""
    long = {"ignore_eos": True}
    return [
        request(prompt, max_tokens, **long),
        request(prompt, max_tokens, temperature=0.9, seed=7, **long),
        request(prompt, max_tokens, temperature=0.8, seed=8, top_p=0.9, top_k=40, **long),
        request(prompt, max_tokens, stop=[stop], **long),
        request(prompt, max_tokens, temperature=0.7, seed=9, repetition_penalty=1.2, frequency_penalty=0.3, **long),
        request(prompt, max_tokens, temperature=0.9, seed=11, n=3, **long),
        request(prompt, max_tokens, temperature=0.9, seed=12, logprobs=2, **long),
        request(prompt, max_tokens, temperature=0.9, seed=13, n=2, logprobs=1, logit_bias={5: 1.0}, **long),
        request(prompt, max_tokens, temperature=0.9, seed=14, allowed_token_ids=range(200, 900, 3), **long),
    ]
