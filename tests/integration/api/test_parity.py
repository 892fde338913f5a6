"""Greedy tokens through three processes equal Hugging Face `generate`.

`tests/unit/families/test_generated_tokens.py` does the same in one process with other models and sizes of steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from services.common.config import EMBEDDED_MODEL
from tests.support.cluster import Cluster, running_cluster
from tests.support.reference import LLAMA3_ROPE, make_served_model, random_prompts, reference_tokens

MAX_ROUNDS = 5  # until enough requests run at once: on a busy machine some come late


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Cluster]]:
    """A random model, served with chunks of 40 tokens and so few blocks that some sequences are preempted."""
    path = make_served_model(tmp_path_factory.mktemp("model"), "llama", rope_parameters=LLAMA3_ROPE)
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


def test_a_random_model_equals_hugging_face(served: tuple[Path, Cluster]) -> None:
    path, cluster = served
    prompts = random_prompts(10, longest=90, seed=1)
    max_tokens = [24 + i for i in range(10)]
    expected = [reference_tokens(path, prompt, count) for prompt, count in zip(prompts, max_tokens, strict=True)]

    alone = cluster.generate(prompts[5], max_tokens[5])
    assert alone.token_ids == expected[5]
    for _ in range(MAX_ROUNDS):
        together = cluster.generate_all(prompts, max_tokens)
        assert [answer.token_ids for answer in together] == expected
        if cluster.dense_status().num_preemptions:
            break
    assert cluster.dense_status().num_preemptions > 0, "the cache was meant to be too small"
    cluster.generate(prompts[9], 1)
    again = cluster.generate(prompts[9], max_tokens[9])
    assert again.token_ids == expected[9]
    assert again.finish.usage.num_cached_tokens > 0, "the prefix was meant to be found"
    cluster.wait_idle()


@pytest.fixture(scope="module")
def embedded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """The embedded model. Most prompts are computed in many steps."""
    settings = ("scheduler.max_num_batched_tokens=16", "scheduler.max_num_seqs=16")
    with running_cluster(tmp_path_factory.mktemp("cluster"), *settings, is_warm=True) as cluster:
        yield cluster


def test_the_embedded_model_equals_hugging_face(embedded: Cluster) -> None:
    prompts = random_prompts(8, longest=200, seed=2)
    max_tokens = [20 + i for i in range(8)]
    expected = [
        reference_tokens(EMBEDDED_MODEL, prompt, count) for prompt, count in zip(prompts, max_tokens, strict=True)
    ]
    together = embedded.generate_all(prompts, max_tokens)
    assert [answer.token_ids for answer in together] == expected
    again = embedded.generate(prompts[6], max_tokens[6])
    assert again.token_ids == expected[6]
    assert again.finish.usage.num_cached_tokens == (len(prompts[6]) - 1) // 16 * 16
    embedded.wait_idle()
