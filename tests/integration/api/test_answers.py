"""Several answers to one prompt, which is computed once: each equals the answer to a request of its own.

The prefix cache is off, so that only forks can save an answer the computation of its prompt.
"""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from services.pb import gateway_pb2, sampling_pb2
from tests.support.adapters import make_adapter, merge_adapter
from tests.support.clients.streams import Collected, collect, collect_all
from tests.support.cluster import Cluster, request, running_cluster
from tests.support.prompt_vectors import make_prompt_tuning, random_vectors
from tests.support.reference import make_served_model, random_prompts, reference_tokens

pytestmark = pytest.mark.timeout(400)  # processes start, and the machine may be slow

NUM_ANSWERS, SEED, MAX_TOKENS = 4, 40, 10
MAX_NUM_SEQS = 6
MAX_ROUNDS = 40  # until all answers are there before the first one ends: they are submitted one by one
NUM_LONG_TOKENS = 80  # so many that a kill comes in the middle
PROMPT = random_prompts(1, 1, seed=1)[0] + random_prompts(2, 90, seed=2)[1]
PATTERN = "([a-f]{2} ){3}[0-9]{2,9}"
SAMPLED = {"temperature": 1.0, "seed": SEED, "ignore_eos": True}
OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {"ignore_eos": True},
    "sampled": SAMPLED,
    "truncated": {**SAMPLED, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
    "penalties": {**SAMPLED, "repetition_penalty": 1.3, "frequency_penalty": 0.5, "presence_penalty": 0.4},
    "logprobs": {**SAMPLED, "logprobs": 3},
    "prompt logprobs": {**SAMPLED, "prompt_logprobs": 2, "logprobs": 0},
    "biases": {**SAMPLED, "logit_bias": {7: 5.0, 9: -100.0}, "min_tokens": 3},
    "form": {"temperature": 1.0, "seed": SEED, "structured_output": sampling_pb2.StructuredOutput(regex=PATTERN)},
    "adapter": {**SAMPLED, "model": "lora"},
    "greedy adapter": {"ignore_eos": True, "model": "lora"},
    "virtual tokens": {**SAMPLED, "model": "tuned"},
}


@dataclass
class Server:
    cluster: Cluster
    model: Path
    merged: Path  # the model with its adapter

    def several(self, options: dict[str, Any], max_tokens: int = MAX_TOKENS) -> gateway_pb2.GenerateRequest:
        return request(PROMPT, max_tokens, n=NUM_ANSWERS, **options)

    def singles(
        self, options: dict[str, Any], max_tokens: int = MAX_TOKENS, num_answers: int = NUM_ANSWERS
    ) -> list[Collected]:
        """The answers to requests for one answer each."""
        seeds = [{"seed": SEED + index} if "seed" in options else {} for index in range(num_answers)]
        messages = [request(PROMPT, max_tokens, **(options | seed)) for seed in seeds]
        return collect_all(self.cluster.gateway, messages)

    def check(self, found: Collected, singles: list[Collected]) -> None:
        assert dict(found.token_ids) == {index: each.token_ids[0] for index, each in enumerate(singles)}
        assert dict(found.text) == {index: each.text[0] for index, each in enumerate(singles)}
        assert found.reasons == {index: each.reasons[0] for index, each in enumerate(singles)}
        for index, each in enumerate(singles):
            assert found.logprobs[index] == pytest.approx(each.logprobs[0], abs=1e-4)
        assert found.prompt_logprobs[0] == pytest.approx(singles[0].prompt_logprobs[0], abs=1e-4)

    @property
    def num_computed_tokens(self) -> int:
        return self.cluster.wait_idle(timeout_s=60.0).num_computed_tokens


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp("answers")
    shape = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48, "head_dim": 8}
    model = make_served_model(directory / "model", "llama", **shape)
    merged = merge_adapter(directory / "merged", model, make_adapter(directory / "lora", model, seed=3, rank=8))
    make_prompt_tuning(directory / "tuned", random_vectors(model, 20, seed=4))
    settings = {
        "model.path": model,
        "attention.enable_prefix_cache": False,
        "attention.block_size": 4,
        "scheduler.max_num_seqs": MAX_NUM_SEQS,
        "scheduler.max_num_batched_tokens": 32,  # a prompt takes several steps
        "dense.max_loras": 1,
        "gateway.lora_modules": json.dumps([f"{name}={directory / name}" for name in ("lora", "tuned")]),
        "launch.max_restarts": 100,
    }
    with running_cluster(directory, *(f"{key}={value}" for key, value in settings.items()), is_warm=True) as cluster:
        yield Server(cluster, model, merged)
        cluster.wait_idle()


@pytest.mark.parametrize("name", OPTIONS)
def test_each_answer_equals_that_to_a_request_of_its_own(server: Server, name: str) -> None:
    options = OPTIONS[name]
    found = collect(server.cluster.gateway, server.several(options))
    server.check(found, server.singles(options))
    if "temperature" in options and name != "form":
        assert len({tuple(token_ids) for token_ids in found.token_ids.values()}) > 1, "the seeds differ"
    if "temperature" not in options:
        expected = reference_tokens(server.merged if "model" in options else server.model, PROMPT, MAX_TOKENS)
        assert all(token_ids == expected for token_ids in found.token_ids.values())
    if name == "form":
        assert all(re.fullmatch(PATTERN, text) for text in found.text.values())


def test_the_prompt_is_computed_once_for_all_answers(server: Server) -> None:
    """Then each answer computes the prompt's last token, and its own tokens but the last one."""
    num_outputs = NUM_ANSWERS * (MAX_TOKENS - 1)
    expected = len(PROMPT) + NUM_ANSWERS - 1 + num_outputs
    counts = []
    for _ in range(MAX_ROUNDS):
        before = server.num_computed_tokens
        collect(server.cluster.gateway, server.several(SAMPLED))
        counts.append(server.num_computed_tokens - before)
        assert counts[-1] <= NUM_ANSWERS * len(PROMPT) + num_outputs
        if counts[-1] == expected:
            return
    raise AssertionError(f"{counts} tokens were computed, {expected} are needed")


def test_more_answers_than_places_take_turns(server: Server) -> None:
    num_answers = 2 * MAX_NUM_SEQS + 1
    options = SAMPLED | {"n": num_answers}
    found = collect(server.cluster.gateway, request(PROMPT, MAX_TOKENS, **options))
    server.check(found, server.singles(SAMPLED, num_answers=num_answers))


def test_answers_survive_a_kill(server: Server) -> None:
    """The kill comes when both groups have begun to answer."""
    options = [SAMPLED, SAMPLED | {"logprobs": 0, "repetition_penalty": 1.2}]
    expected = [server.singles(each, NUM_LONG_TOKENS) for each in options]
    messages = [server.several(each, NUM_LONG_TOKENS) for each in options]
    pid = server.cluster.pid_of("dense_worker")
    collected = collect_all(server.cluster.gateway, messages, lambda: os.kill(pid, signal.SIGKILL))
    for found, singles in zip(collected, expected, strict=True):
        server.check(found, singles)
    server.cluster.wait_idle(timeout_s=60.0)
