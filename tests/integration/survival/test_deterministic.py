"""`dense.deterministic` in a whole server: answers, and their log-probabilities, are those of each request alone.

In bfloat16, and to the last bit: beside other requests, with too few blocks, so that sequences are computed again in
other chunks, with drafts, and through kills of both workers.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from services.pb import gateway_pb2
from tests.support.clients.streams import Collected, collect, collect_all
from tests.support.cluster import request
from tests.support.models import TWO_LAYERS
from tests.support.plain_services import PlainServices, plain_services

pytestmark = pytest.mark.timeout(400)  # processes start several times, and the machine may be slow

SETTINGS = {
    "dense.deterministic": "true",
    "model.dtype": "bfloat16",
    "scheduler.policy": "max_utilization",
    "scheduler.max_num_batched_tokens": 48,
    "scheduler.max_num_seqs": 8,
    "scheduler.speculation": "ngram",
    "attention.num_blocks": 26,  # of 16 tokens: fewer than all requests together need
}
MAX_TOKENS = 20
PROMPT = "The capital of France is Paris. The capital of Italy is Rome. What is the capital of "


@pytest.fixture(scope="module")
def services(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PlainServices]:
    settings = [f"{key}={value}" for key, value in SETTINGS.items()]
    with plain_services(tmp_path_factory.mktemp("services"), TWO_LAYERS, *settings) as services:
        yield services


def messages() -> list[gateway_pb2.GenerateRequest]:
    """Prompts of several lengths, some with a common prefix, greedy and drawn."""
    prompts = [PROMPT * (1 + index % 3) + str(index // 2) for index in range(6)]
    return [
        request(prompt, MAX_TOKENS, temperature=0.8 * (index % 2), seed=index, logprobs=2, ignore_eos=True)
        for index, prompt in enumerate(prompts)
    ]


def assert_same_bits(found: list[Collected], expected: list[Collected]) -> None:
    for each, alone in zip(found, expected, strict=True):
        assert each.token_ids == alone.token_ids
        assert each.logprobs == alone.logprobs  # float32 as float64: equal numbers have equal bits


def test_answers_and_log_probabilities_are_those_of_each_request_alone(services: PlainServices) -> None:
    alone = [collect(services.gateway, message) for message in messages()]
    assert_same_bits(collect_all(services.gateway, messages()), alone)
    for killed in ("dense_worker", "attn_worker"):
        disturbed = collect_all(services.gateway, messages(), lambda killed=killed: services.kill(killed))
        assert_same_bits(disturbed, alone)
    services.wait_idle(timeout_s=60.0)


def test_an_answer_that_is_scored_again_has_the_log_probabilities_it_was_sampled_with(services: PlainServices) -> None:
    drawn = request(PROMPT, MAX_TOKENS, temperature=0.9, seed=3, logprobs=0, ignore_eos=True)
    sampled = collect(services.gateway, drawn)
    prompt = list(services.gateway.Generate(request(PROMPT, 0, echo=True), timeout=60).prompt.token_ids)
    scored = collect(services.gateway, request([*prompt, *sampled.token_ids[0]], 0, prompt_logprobs=0))
    assert scored.prompt_logprobs[0][-MAX_TOKENS:] == sampled.logprobs[0]
