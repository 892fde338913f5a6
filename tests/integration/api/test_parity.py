"""Greedy tokens through three processes equal Hugging Face `generate`, however the steps are cut."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from services.common.config import EMBEDDED_MODEL
from tests.support.cluster import Cluster, running_cluster
from tests.support.reference import make_served_model, random_prompts, reference_tokens

MAX_ROUNDS = 5  # until enough requests run at once: on a busy machine some come late
# Name, family, overrides of config.json. The variants cover several kinds of RoPE scaling.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-gqa-llama3": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "llama-mha-bias-tied-yarn": (
        "llama",
        {
            "num_key_value_heads": 4,
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": True,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 128,
            },
        },
    ),
    "mistral-mqa-sliding-window": ("mistral", {"num_key_value_heads": 1, "sliding_window": 24}),
    "qwen2-linear": (
        "qwen2",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}},
    ),
    "qwen3-q-k-norm": ("qwen3", {"head_dim": 32}),
}


@pytest.fixture(scope="module", params=VARIANTS)
def variant(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Cluster]]:
    """A random model, served with chunks of 40 tokens and so few blocks that some sequences are preempted."""
    family, overrides = VARIANTS[request.param]
    path = make_served_model(tmp_path_factory.mktemp(request.param), family, **overrides)
    settings = (
        f"model.path={path}",
        "scheduler.max_num_batched_tokens=40",
        "scheduler.max_num_seqs=16",
        "scheduler.policy=max_utilization",
        "attention.block_size=8",
        "attention.num_blocks=28",
    )
    with running_cluster(tmp_path_factory.mktemp("cluster"), *settings, is_warm=True) as cluster:
        yield path, cluster


def test_random_model_of_each_family_equals_hugging_face(variant: tuple[Path, Cluster]) -> None:
    path, cluster = variant
    prompts = random_prompts(16, longest=90, seed=1)
    max_tokens = [24 + i for i in range(16)]
    expected = [reference_tokens(path, prompt, count) for prompt, count in zip(prompts, max_tokens, strict=True)]

    alone = cluster.generate(prompts[9], max_tokens[9])
    assert alone.token_ids == expected[9]
    config = json.loads((path / "config.json").read_text())
    has_window = config.get("sliding_window") is not None  # blocks behind it become free, sometimes soon enough
    for _ in range(MAX_ROUNDS):
        together = cluster.generate_all(prompts, max_tokens)
        assert [answer.token_ids for answer in together] == expected
        if has_window or cluster.dense_status().num_preemptions:
            break
    assert has_window or cluster.dense_status().num_preemptions > 0, "the cache was meant to be too small"
    cluster.generate(prompts[15], 1)
    again = cluster.generate(prompts[15], max_tokens[15])
    assert again.token_ids == expected[15]
    assert again.finish.usage.num_cached_tokens > 0, "the prefix was meant to be found"
    cluster.wait_idle()


@pytest.fixture(scope="module", params=[16, 100, 512])
def embedded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """The embedded model. The parameter is the maximum number of tokens of a step."""
    settings = (f"scheduler.max_num_batched_tokens={request.param}", "scheduler.max_num_seqs=16")
    with running_cluster(tmp_path_factory.mktemp("cluster"), *settings, is_warm=True) as cluster:
        yield cluster


def test_embedded_model_equals_hugging_face_at_every_chunk_size(embedded: Cluster) -> None:
    prompts = random_prompts(16, longest=300, seed=2)
    max_tokens = [20 + i for i in range(16)]
    expected = [
        reference_tokens(EMBEDDED_MODEL, prompt, count) for prompt, count in zip(prompts, max_tokens, strict=True)
    ]
    together = embedded.generate_all(prompts, max_tokens)
    assert [answer.token_ids for answer in together] == expected
    again = embedded.generate(prompts[12], max_tokens[12])
    assert again.token_ids == expected[12]
    assert again.finish.usage.num_cached_tokens == (len(prompts[12]) - 1) // 16 * 16
    embedded.wait_idle()
