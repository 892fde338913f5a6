"""Families that differ from Llama on both workers, in a cluster on a GPU: deaths of workers, cached prefixes."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.common.config import EMBEDDED_MODEL
from tests.gpu.gpu_cluster import WORKERS, gpu_cluster
from tests.support.clients.streams import collect_all
from tests.support.cluster import Cluster, request
from tests.support.dense.family_models import make_family_model
from tests.support.reference import TOKENIZER_FILES, VOCAB_SIZE, random_prompts, reference_tokens

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
MAX_TOKENS = 120
# The long prompts take several steps, in which the others decode.
PROMPTS = [*random_prompts(3, longest=60, seed=2), *random_prompts(3, longest=330, seed=3)[1:], [7, 8, 9]]


# Heads of their own sizes and shared keys; experts beside each MLP; gated delta layers.
@pytest.fixture(scope="module", params=["gemma4-shared", "gemma4-moe", "qwen3_next", "qwen3_5"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Cluster]]:
    """In float32: in bfloat16 a batch of another size may choose other tokens."""
    family = request.param
    path = tmp_path_factory.mktemp(family)
    make_family_model(path, family, vocab_size=VOCAB_SIZE, max_position_embeddings=512)
    for name in TOKENIZER_FILES:
        shutil.copy(EMBEDDED_MODEL / name, path)
    settings = (
        f"model.path={path}",
        "model.dtype=float32",
        "scheduler.max_num_batched_tokens=160",
        "scheduler.max_num_seqs=8",
    )
    with gpu_cluster(tmp_path_factory.mktemp("cluster"), *settings) as cluster:
        yield path, cluster


def test_streams_equal_hugging_face_over_the_death_of_each_worker(served: tuple[Path, Cluster]) -> None:
    path, cluster = served
    messages = [request(prompt, MAX_TOKENS, ignore_eos=True) for prompt in PROMPTS]
    expected = [reference_tokens(path, prompt, MAX_TOKENS) for prompt in PROMPTS]
    assert [each.token_ids[0] for each in collect_all(cluster.gateway, messages)] == expected
    for role in WORKERS:
        pid = cluster.pid_of(role)
        found = collect_all(cluster.gateway, messages, lambda pid=pid: os.kill(pid, signal.SIGKILL))
        assert [each.token_ids[0] for each in found] == expected
        cluster.wait_idle()
        assert cluster.pid_of(role) != pid


def test_a_cached_prefix_gives_the_same_tokens(served: tuple[Path, Cluster]) -> None:
    path, cluster = served
    prompt = random_prompts(2, longest=200, seed=5)[1]
    first = cluster.generate(prompt, 1)
    assert first.finish.usage.num_cached_tokens == 0
    again = cluster.generate(prompt, 40)
    assert again.finish.usage.num_cached_tokens == (len(prompt) - 1) // 16 * 16
    assert again.token_ids == reference_tokens(path, prompt, 40)
