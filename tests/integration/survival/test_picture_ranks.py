"""Pictures with several ranks: the first one has the tower, and all get its rows. Tokens are those of Hugging Face."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch

from tests.support.clients.streams import collect_all
from tests.support.cluster import Cluster, request, running_cluster
from tests.support.dense.vision_models import load_true_model, noise
from tests.support.prompt_vectors import embeds_of
from tests.support.rank_processes import pid_of
from tests.support.served_vision import (
    Turn,
    chat_message,
    expected_tokens,
    make_served_vision_model,
    pictures_of,
    rendered,
)

pytestmark = pytest.mark.timeout(300)  # processes start twice, and the machine may be slow

FIRST, SECOND = noise(50, 37, 1), noise(20, 60, 2)
NUM_TOKENS = 60
TEXT = {"num_attention_heads": 8, "num_hidden_layers": 6}  # with which answers depend on the pictures
GEMMA = TEXT | {"layer_types": ["sliding_attention", "full_attention"] * 3}
SETTINGS = (  # steps have less room than one of the prompts needs
    "scheduler.max_num_batched_tokens=64",
    "scheduler.max_num_seqs=8",
    "attention.num_blocks=200",
    "gateway.enable_prompt_embeds=true",
)
CHATS: list[list[Turn]] = [
    [("user", ["All ", FIRST, SECOND, FIRST])],
    [("user", ["All ", SECOND, FIRST, FIRST])],
    [("user", ["None at all"])],
]


@pytest.mark.parametrize(
    ("variant", "ranks"),
    [
        ("qwen3_vl", "tensor_parallel_size"),  # with vectors that are added after the first layers
        ("gemma3", "tensor_parallel_size"),  # with a factor of embeddings, which vectors do not get
        ("qwen3_vl", "pipeline_parallel_size"),
    ],
)
def test_tokens_are_those_of_one_rank_over_a_kill_of_another(variant: str, ranks: str, tmp_path: Path) -> None:
    model = make_served_vision_model(tmp_path / "model", variant, **GEMMA if variant == "gemma3" else TEXT)
    expected = [expected_tokens(model, rendered(each), pictures_of(each), NUM_TOKENS, variant) for each in CHATS]
    assert expected[0] != expected[1], "answers depend on the pictures"
    with running_cluster(tmp_path, f"model.path={model}", f"dense.{ranks}=2", *SETTINGS, is_warm=True) as cluster:
        messages = [chat_message(each, NUM_TOKENS) for each in CHATS]
        killed = pid_of(cluster, "dense_worker-1")
        found = collect_all(cluster.gateway, messages, lambda: os.kill(killed, signal.SIGKILL))
        assert [each.token_ids[0] for each in found] == expected
        assert pid_of(cluster, "dense_worker-1") != killed
        truth = load_true_model(model, variant)
        check_vectors_of_clients(cluster, truth.get_input_embeddings())
        check_long_prompts(cluster, truth)
        cluster.wait_idle()


def check_vectors_of_clients(cluster: Cluster, embed: torch.nn.Module) -> None:
    """The embeddings of tokens, sent as vectors, give the answer to these tokens."""
    prompt = list(range(100, 190))
    by_ids, by_vectors = request(prompt, NUM_TOKENS, ignore_eos=True), request([], NUM_TOKENS, ignore_eos=True)
    by_vectors.prompt_embeds.CopyFrom(embeds_of(embed(torch.tensor(prompt)).detach()))
    expected, found = collect_all(cluster.gateway, [by_ids, by_vectors])
    assert found.token_ids == expected.token_ids


@torch.inference_mode()
def check_long_prompts(cluster: Cluster, truth: torch.nn.Module) -> None:
    """The log-probabilities of a prompt whose first step samples nothing."""
    prompt = list(range(190, 100, -1))
    [found] = collect_all(cluster.gateway, [request(prompt, 1, prompt_logprobs=0)])
    logprobs = truth(torch.tensor([prompt])).logits[0].log_softmax(-1)[:-1]
    expected = logprobs.gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
    assert found.prompt_logprobs[0][-len(expected) :] == pytest.approx(expected.tolist(), abs=1e-3)
