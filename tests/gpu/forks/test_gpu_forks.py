"""Forks on a GPU: several answers to one prompt, and beams.

In float32 the tokens do not depend on the size of a step.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.pb import sampling_pb2
from tests.gpu.gpu_cluster import gpu_cluster
from tests.support.clients.streams import collect, collect_all
from tests.support.cluster import REQUEST_TIMEOUT_S, Cluster, request
from tests.support.reference import make_served_model, random_prompts, reference_beams, reference_tokens

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

NUM_ANSWERS, SEED, MAX_TOKENS = 4, 40, 60
PROMPTS = random_prompts(4, 200, seed=6)[1:]  # longer than a step, and of no whole number of blocks


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape = {"hidden_size": 128, "head_dim": 32, "max_position_embeddings": 2048}
    return make_served_model(tmp_path_factory.mktemp("model"), "llama", **shape)


@pytest.fixture(scope="module")
def cluster(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """The prefix cache is off, so that only forks can save an answer the computation of its prompt."""
    settings = {
        "model.path": model,
        "model.dtype": "float32",
        "attention.enable_prefix_cache": "false",
        "scheduler.max_num_batched_tokens": 96,
        "scheduler.max_num_seqs": 16,
    }
    overrides = [f"{key}={value}" for key, value in settings.items()]
    with gpu_cluster(tmp_path_factory.mktemp("cluster"), *overrides) as cluster:
        yield cluster


def test_greedy_answers_are_those_of_hugging_face(cluster: Cluster, model: Path) -> None:
    messages = [request(prompt, MAX_TOKENS, n=NUM_ANSWERS, ignore_eos=True) for prompt in PROMPTS]
    for prompt, found in zip(PROMPTS, collect_all(cluster.gateway, messages), strict=True):
        expected = reference_tokens(model, prompt, MAX_TOKENS)
        assert dict(found.token_ids) == dict.fromkeys(range(NUM_ANSWERS), expected)


@pytest.mark.parametrize("kills", [False, True], ids=["undisturbed", "killed"])
def test_each_answer_equals_that_to_a_request_of_its_own(cluster: Cluster, kills: bool) -> None:
    options = {"temperature": 1.0, "ignore_eos": True, "logprobs": 2, "repetition_penalty": 1.2}
    singles = {
        index: collect(cluster.gateway, request(PROMPTS[-1], MAX_TOKENS, seed=SEED + index, **options))
        for index in range(NUM_ANSWERS)
    }

    def kill() -> None:
        if kills:
            os.kill(cluster.pid_of("dense_worker"), signal.SIGKILL)

    message = request(PROMPTS[-1], MAX_TOKENS, n=NUM_ANSWERS, seed=SEED, **options)
    [found] = collect_all(cluster.gateway, [message], kill)
    assert dict(found.token_ids) == {index: each.token_ids[0] for index, each in singles.items()}
    for index, each in singles.items():
        assert found.logprobs[index] == pytest.approx(each.logprobs[0], abs=1e-3)
    cluster.wait_idle(timeout_s=60.0)


@pytest.mark.parametrize("num_beams", [2, 8])
def test_beams_are_those_of_transformers(cluster: Cluster, model: Path, num_beams: int) -> None:
    search = sampling_pb2.BeamSearch(length_penalty=1.0, early_stopping=sampling_pb2.EARLY_STOPPING_HEURISTIC)
    for prompt in PROMPTS:
        message = request(prompt, 20, n=num_beams, best_of=num_beams, beam_search=search)
        found = cluster.gateway.Generate(message, timeout=REQUEST_TIMEOUT_S).completions
        expected = reference_beams(model, prompt, num_beams, 20, None)
        assert [list(each.token_ids) for each in found] == [token_ids for token_ids, _ in expected]
        scores = [each.finish.beam_score for each in found]
        assert scores == pytest.approx([score for _, score in expected], abs=1e-2)
