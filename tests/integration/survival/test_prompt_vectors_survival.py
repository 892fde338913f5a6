"""Prompts with vectors in place of tokens, end to end and over kills: virtual tokens of prompt tuning, and embeddings.

Hugging Face gives the expected tokens, with the same vectors as `inputs_embeds`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx2
import pytest
import torch
from transformers import AutoTokenizer

from services.pb import gateway_pb2
from tests.support.adapters import make_adapter, merge_adapter
from tests.support.clients.http_clients import client
from tests.support.clients.streams import Collected, collect_all
from tests.support.cluster import Cluster, ctl, request, running_cluster
from tests.support.prompt_vectors import (
    embeddings_of,
    embeds_of,
    logits_after_vectors,
    make_prompt_tuning,
    random_vectors,
    tokens_after_vectors,
)
from tests.support.reference import make_served_model, random_prompts, reference_tokens
from tests.support.torch_files import encoded

pytestmark = pytest.mark.timeout(400)  # processes start several times, and the machine may be slow

NUM_LONG_TOKENS = 120  # so many that a kill comes in the middle
BLOCK_SIZE = 16  # of the KV cache
MAX_ROUNDS = 5  # until enough streams run at once for one to give way
PROMPTS = random_prompts(3, 40, seed=5)
VIRTUAL = {"tuned": (20, torch.float32), "short": (1, torch.bfloat16)}  # number and dtype of virtual tokens
EMBEDS = "embeds"  # in place of an adapter's name: the prompt is sent as embeddings, after vectors of its own
NUM_OWN_VECTORS = 150  # so many that they take several steps


@dataclass
class Server:
    cluster: Cluster
    model: Path
    merged: Path  # the model with the LoRA adapter
    virtual_tokens: dict[str, torch.Tensor]  # by the name of the adapter

    def vectors(self, name: str, prompt: list[int]) -> torch.Tensor:
        own = random_vectors(self.model, NUM_OWN_VECTORS, seed=9) if name == EMBEDS else self.virtual_tokens[name]
        return torch.cat([own, embeddings_of(self.model, prompt)])

    def messages(self, sent: Sequence[tuple[str, list[int]]], num_tokens: int) -> list[gateway_pb2.GenerateRequest]:
        messages = [request(prompt, num_tokens, model=name, ignore_eos=True) for name, prompt in sent]
        for message, (name, prompt) in zip(messages, sent, strict=True):
            if name == EMBEDS:
                message.model = ""
                message.prompt_embeds.CopyFrom(embeds_of(self.vectors(name, prompt)))
        return messages

    def post(self, body: dict[str, object]) -> httpx2.Response:
        with client(self.cluster.http_address) as http:
            return http.post("/v1/completions", json=body)

    def check(self, sent: Sequence[tuple[str, list[int]]], found: Sequence[Collected], num_tokens: int) -> None:
        for (name, prompt), each in zip(sent, found, strict=True):
            if name:
                expected = tokens_after_vectors(self.model, self.vectors(name, prompt), num_tokens)
            else:
                expected = reference_tokens(self.model, prompt, num_tokens)
            assert each.token_ids[0] == expected, f"adapter {name!r}"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp("vectors")
    model = make_served_model(directory / "model", "llama", num_hidden_layers=2)
    virtual_tokens = {}
    for seed, (name, (num_tokens, dtype)) in enumerate(VIRTUAL.items()):
        vectors = random_vectors(model, num_tokens, seed).to(dtype)
        make_prompt_tuning(directory / name, vectors)
        virtual_tokens[name] = vectors.float()
    merged = merge_adapter(directory / "merged", model, make_adapter(directory / "lora", model))
    settings = {
        "model.path": model,
        "dense.max_loras": 1,
        "gateway.lora_modules": json.dumps([f"{name}={directory / name}" for name in (*VIRTUAL, "lora")]),
        "gateway.enable_prompt_embeds": True,
        "scheduler.max_num_batched_tokens": 64,
        "scheduler.speculation": "ngram",
        "scheduler.policy": "max_utilization",
        "attention.num_blocks": 40,  # too few for the streams that are killed: sequences give way
    }
    with running_cluster(directory, *(f"{key}={value}" for key, value in settings.items()), is_warm=True) as cluster:
        yield Server(cluster, model, merged, virtual_tokens)
        cluster.wait_idle()


def test_vectors_stand_in_prompts_and_count_in_their_length(server: Server) -> None:
    """The same prompts with and without them, twice: the prefixes that they leave must not be mixed up."""
    sent = [(name, prompt) for prompt in PROMPTS for name in ("", *VIRTUAL, EMBEDS)]
    for _ in range(2):
        found = collect_all(server.cluster.gateway, server.messages(sent, 20))
        server.check(sent, found, 20)
    lengths = {"": 0, **{name: count for name, (count, _) in VIRTUAL.items()}, EMBEDS: NUM_OWN_VECTORS}
    for name, num_vectors in lengths.items():
        (message,) = server.messages([(name, PROMPTS[-1])], 2)
        server.cluster.gateway.Generate(message, timeout=60)
        usage = server.cluster.gateway.Generate(message, timeout=60).completions[0].finish.usage
        num_prompt_tokens = len(PROMPTS[-1]) + num_vectors
        num_cached_tokens = (num_prompt_tokens - 1) // BLOCK_SIZE * BLOCK_SIZE
        assert (usage.num_prompt_tokens, usage.num_cached_tokens) == (num_prompt_tokens, num_cached_tokens)


def test_embeddings_of_tokens_are_these_tokens(server: Server) -> None:
    """Over HTTP as torch.save writes them, in a list, with a LoRA adapter, and sampled."""
    embeds = [encoded(embeddings_of(server.model, prompt)) for prompt in PROMPTS]
    sampled = {"max_tokens": 20, "ignore_eos": True, "temperature": 1.0, "seed": 7, "n": 2}

    def answer(**body: object) -> list[list[int]]:
        response = server.post({"return_token_ids": True, **body})
        assert response.status_code == 200, response.text
        return [choice["token_ids"] for choice in response.json()["choices"]]

    assert answer(prompt_embeds=embeds, **sampled) == answer(prompt=PROMPTS, **sampled)
    greedy = {"max_tokens": 20, "ignore_eos": True, "temperature": 0, "model": "lora"}
    expected = [reference_tokens(server.merged, prompt, 20) for prompt in PROMPTS]
    assert answer(prompt_embeds=embeds, **greedy) == expected


@pytest.mark.parametrize(
    "roles", [("dense_worker",), ("attn_worker",), ("dense_worker", "attn_worker")], ids=" and ".join
)
def test_streams_survive_kills(server: Server, roles: tuple[str, ...]) -> None:
    sent = [("tuned", PROMPTS[0]), ("short", PROMPTS[1]), ("", PROMPTS[1]), (EMBEDS, PROMPTS[2]), (EMBEDS, PROMPTS[0])]
    messages = server.messages(sent, NUM_LONG_TOKENS)
    for _ in range(MAX_ROUNDS):
        found = collect_all(server.cluster.gateway, messages, lambda: server.cluster.kill(*roles))
        server.check(sent, found, NUM_LONG_TOKENS)
        server.cluster.wait_idle()
        if server.cluster.dense_status().num_preemptions:
            return
    raise AssertionError("the cache was meant to be too small")


def test_streams_survive_the_replacement_of_the_dense_worker(server: Server) -> None:
    sent = [("tuned", PROMPTS[0]), (EMBEDS, PROMPTS[0]), ("", PROMPTS[2])]
    done = []
    found = collect_all(
        server.cluster.gateway,
        server.messages(sent, NUM_LONG_TOKENS),
        lambda: done.append(ctl(server.cluster, "replace-dense")),
    )
    assert done[0].returncode == 0, done[0].stderr
    server.check(sent, found, NUM_LONG_TOKENS)
    server.cluster.wait_idle()


def test_penalties_and_echo_know_only_the_tokens(server: Server) -> None:
    penalty, prompt = 1.3, PROMPTS[1]
    message = request(prompt, 12, model="tuned", ignore_eos=True, echo=True)
    (of_vectors,) = server.messages([(EMBEDS, prompt)], 12)
    for each in (message, of_vectors):
        each.sampling.repetition_penalty = penalty
    found = collect_all(server.cluster.gateway, [message, of_vectors])
    for name, seen, each in (("tuned", prompt, found[0]), (EMBEDS, [], found[1])):
        vectors, token_ids = server.vectors(name, prompt), list(seen)
        for token_id in each.token_ids[0]:  # the formula of arXiv:1909.05858
            logits = logits_after_vectors(server.model, vectors)
            unique = list(set(token_ids))
            logits[unique] = torch.where(logits[unique] > 0, logits[unique] / penalty, logits[unique] * penalty)
            assert token_id == int(logits.argmax())
            token_ids.append(token_id)
            vectors = torch.cat([vectors, embeddings_of(server.model, [token_id])])
        assert len(each.token_ids[0]) == 12
    text = AutoTokenizer.from_pretrained(server.model).decode(prompt, skip_special_tokens=True)
    assert found[0].text[0].startswith(text.rstrip("\N{REPLACEMENT CHARACTER}")), "it may end within one"


def test_embeddings_that_overflow_harm_no_other_request(server: Server) -> None:
    """They are legal numbers of float32 whose squares are none. Their blocks go to the next sequences."""
    for value in (3e38, 1e30, -1e-40):
        vectors = torch.full((40, embeddings_of(server.model, [5]).shape[1]), value)
        vectors[::2] = -vectors[::2]
        body = {"prompt_embeds": encoded(vectors), "max_tokens": 3, "logprobs": 2, "temperature": 1.0}
        response = server.post(body)
        assert response.status_code == 200, response.text
        json.loads(response.content, parse_constant=pytest.fail)
    sent = [("", prompt) for prompt in PROMPTS * 8]
    server.check(sent, collect_all(server.cluster.gateway, server.messages(sent, 5)), 5)
