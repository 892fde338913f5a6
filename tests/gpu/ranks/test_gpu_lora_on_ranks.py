"""Adapters on two GPUs: the tokens of Hugging Face with each merged in, in float32, also when a shard dies.

And vectors in prompts, which the first rank gives to the others.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from tests.gpu.gpu_streams import small_cluster
from tests.support.adapters import make_adapter, merge_adapter
from tests.support.clients.streams import collect_all
from tests.support.cluster import Cluster, request
from tests.support.prompt_vectors import embeddings_of, embeds_of
from tests.support.rank_processes import pid_of
from tests.support.reference import random_prompts, reference_tokens

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(400),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="each rank needs a GPU of its own"),
]

ARRANGEMENTS = {"tensor": "dense.tensor_parallel_size=2", "pipeline": "dense.pipeline_parallel_size=2"}
NAMES = ("0", "1", "2")  # more than slots
PROMPTS = random_prompts(2, longest=150, seed=6)
NUM_TOKENS = 200


@dataclass
class Server:
    cluster: Cluster
    models: dict[str, Path]  # as merged for Hugging Face, by the name of the adapter; "" is the model itself

    def check(self, names: Sequence[str], disturb: Callable[[], object] = lambda: None) -> None:
        sent = [(name, prompt) for prompt in PROMPTS for name in names]
        messages = [request(prompt, NUM_TOKENS, model=name, ignore_eos=True) for name, prompt in sent]
        found = collect_all(self.cluster.gateway, messages, disturb)
        for (name, prompt), each in zip(sent, found, strict=True):
            assert each.token_ids[0] == reference_tokens(self.models[name], prompt, NUM_TOKENS), f"adapter {name!r}"
        self.cluster.wait_idle()


@pytest.fixture(scope="module")
def models(llama_path: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directory, models = tmp_path_factory.mktemp("adapters"), {"": llama_path}
    for seed, name in enumerate(NAMES):
        adapter = make_adapter(directory / name, llama_path, seed=seed, rank=(4, 16, 8)[seed])
        models[name] = merge_adapter(directory / f"merged{name}", llama_path, adapter)
    return models


@pytest.fixture(scope="module", params=ARRANGEMENTS)
def server(
    request: pytest.FixtureRequest, models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    directory, adapters = tmp_path_factory.mktemp("lora-on-ranks"), models["0"].parent
    modules = json.dumps([f"{name}={adapters / name}" for name in NAMES])
    settings = ("dense.max_loras=2", f"gateway.lora_modules={modules}", "gateway.enable_prompt_embeds=true")
    with small_cluster(models[""], directory, *settings, ARRANGEMENTS[request.param]) as cluster:
        yield Server(cluster, models)


def test_streams_with_adapters_are_those_of_merged_models(server: Server) -> None:
    server.check(("", *NAMES))


def test_streams_with_adapters_survive_a_shard(server: Server) -> None:
    server.check(("", *NAMES[:2]), lambda: os.kill(pid_of(server.cluster, "dense_worker-1"), signal.SIGKILL))


def test_vectors_in_prompts_reach_all_ranks(server: Server) -> None:
    messages = [request([1], NUM_TOKENS, ignore_eos=True) for _ in PROMPTS]
    for message, prompt in zip(messages, PROMPTS, strict=True):
        message.prompt_embeds.CopyFrom(embeds_of(embeddings_of(server.models[""], prompt)))
    found = collect_all(server.cluster.gateway, messages)
    expected = [reference_tokens(server.models[""], prompt, NUM_TOKENS) for prompt in PROMPTS]
    assert [each.token_ids[0] for each in found] == expected
