"""Prompts with vectors in place of tokens, end to end and over kills: virtual tokens of prompt tuning.

Hugging Face gives the expected tokens, with the same vectors as `inputs_embeds`.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from services.pb import gateway_pb2
from tests.support.adapters import make_adapter
from tests.support.clients.streams import Collected, collect, collect_all
from tests.support.cluster import Cluster, ctl, request, running_cluster
from tests.support.prompt_vectors import (
    embeddings_of,
    logits_after_vectors,
    make_prompt_tuning,
    random_vectors,
    tokens_after_vectors,
)
from tests.support.reference import make_served_model, random_prompts, reference_tokens

pytestmark = pytest.mark.timeout(400)  # processes start several times, and the machine may be slow

NUM_LONG_TOKENS = 300  # so many that a kill comes in the middle
BLOCK_SIZE = 16  # of the KV cache
PROMPTS = random_prompts(3, 40, seed=5)
VIRTUAL = {"tuned": (20, torch.float32), "short": (1, torch.bfloat16)}  # number and dtype of virtual tokens


@dataclass
class Server:
    cluster: Cluster
    model: Path
    virtual_tokens: dict[str, torch.Tensor]  # by the name of the adapter

    def expected(self, name: str, prompt: list[int], num_tokens: int) -> list[int]:
        if not name:
            return reference_tokens(self.model, prompt, num_tokens)
        vectors = torch.cat([self.virtual_tokens[name], embeddings_of(self.model, prompt)])
        return tokens_after_vectors(self.model, vectors, num_tokens)

    def check(self, sent: Sequence[tuple[str, list[int]]], found: Sequence[Collected], num_tokens: int) -> None:
        for (name, prompt), each in zip(sent, found, strict=True):
            assert each.token_ids[0] == self.expected(name, prompt, num_tokens), f"adapter {name!r}"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp("vectors")
    model = make_served_model(directory / "model", "llama", num_hidden_layers=2)
    virtual_tokens = {}
    for seed, (name, (num_tokens, dtype)) in enumerate(VIRTUAL.items()):
        vectors = random_vectors(model, num_tokens, seed).to(dtype)
        make_prompt_tuning(directory / name, vectors)
        virtual_tokens[name] = vectors.float()
    make_adapter(directory / "lora", model)
    settings = {
        "model.path": model,
        "dense.max_loras": 1,
        "gateway.lora_modules": json.dumps([f"{name}={directory / name}" for name in (*VIRTUAL, "lora")]),
        "scheduler.max_num_batched_tokens": 64,  # long prompts take several steps
        "scheduler.speculation": "ngram",
    }
    with running_cluster(directory, *(f"{key}={value}" for key, value in settings.items()), is_warm=True) as cluster:
        yield Server(cluster, model, virtual_tokens)
        cluster.wait_idle()


def messages(sent: Sequence[tuple[str, list[int]]], num_tokens: int) -> list[gateway_pb2.GenerateRequest]:
    return [request(prompt, num_tokens, model=name, ignore_eos=True) for name, prompt in sent]


def test_virtual_tokens_stand_before_each_prompt_and_count_in_its_length(server: Server) -> None:
    """The same prompts with and without them, twice: the prefixes that they leave must not be mixed up."""
    sent = [(name, prompt) for prompt in PROMPTS for name in ("", *VIRTUAL)]
    for _ in range(2):
        found = collect_all(server.cluster.gateway, messages(sent, 20))
        server.check(sent, found, 20)
    for name, num_virtual_tokens in {"": 0, **{name: count for name, (count, _) in VIRTUAL.items()}}.items():
        (message,) = messages([(name, PROMPTS[-1])], 2)
        usage = server.cluster.gateway.Generate(message, timeout=60).completions[0].finish.usage
        num_prompt_tokens = len(PROMPTS[-1]) + num_virtual_tokens
        num_cached_tokens = (num_prompt_tokens - 1) // BLOCK_SIZE * BLOCK_SIZE
        assert (usage.num_prompt_tokens, usage.num_cached_tokens) == (num_prompt_tokens, num_cached_tokens)


@pytest.mark.parametrize(
    "roles", [("dense_worker",), ("attn_worker",), ("dense_worker", "attn_worker")], ids=" and ".join
)
def test_streams_survive_kills(server: Server, roles: tuple[str, ...]) -> None:
    sent = [("tuned", PROMPTS[0]), ("short", PROMPTS[1]), ("", PROMPTS[1]), ("tuned", PROMPTS[2])]

    def kill() -> None:
        for role in roles:
            os.kill(server.cluster.pid_of(role), signal.SIGKILL)

    found = collect_all(server.cluster.gateway, messages(sent, NUM_LONG_TOKENS), kill)
    server.check(sent, found, NUM_LONG_TOKENS)
    server.cluster.wait_idle()


def test_streams_survive_the_replacement_of_the_dense_worker(server: Server) -> None:
    sent = [("tuned", PROMPTS[0]), ("short", PROMPTS[0]), ("", PROMPTS[2])]
    done = []
    found = collect_all(
        server.cluster.gateway,
        messages(sent, NUM_LONG_TOKENS),
        lambda: done.append(ctl(server.cluster, "replace-dense")),
    )
    assert done[0].returncode == 0, done[0].stderr
    server.check(sent, found, NUM_LONG_TOKENS)
    server.cluster.wait_idle()


def test_penalties_and_echo_know_only_the_tokens(server: Server) -> None:
    penalty, prompt = 1.3, PROMPTS[1]
    message = request(prompt, 12, model="tuned", ignore_eos=True, echo=True)
    message.sampling.repetition_penalty = penalty
    collected = collect(server.cluster.gateway, message)
    vectors, token_ids = torch.cat([server.virtual_tokens["tuned"], embeddings_of(server.model, prompt)]), list(prompt)
    for found in collected.token_ids[0]:  # the formula of arXiv:1909.05858
        logits = logits_after_vectors(server.model, vectors)
        seen = list(set(token_ids))
        logits[seen] = torch.where(logits[seen] > 0, logits[seen] / penalty, logits[seen] * penalty)
        assert found == int(logits.argmax())
        token_ids.append(found)
        vectors = torch.cat([vectors, embeddings_of(server.model, [found])])
    assert len(token_ids) == len(prompt) + 12
    tokenizer = AutoTokenizer.from_pretrained(server.model)
    text = tokenizer.decode(prompt, skip_special_tokens=True)
    assert collected.text[0].startswith(text.rstrip("\N{REPLACEMENT CHARACTER}")), "it may end within one"
