"""Models with gated delta layers end to end: their states over replacements, preemptions, forks and cached prefixes.

`test_family_survival.py` kills their workers.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from services.common.config import EMBEDDED_MODEL
from services.pb import gateway_pb2, sampling_pb2
from tests.support.clients.streams import collect_all
from tests.support.cluster import REQUEST_TIMEOUT_S, Cluster, ctl, request, running_cluster
from tests.support.dense.family_models import make_family_model
from tests.support.reference import (
    TOKENIZER_FILES,
    VOCAB_SIZE,
    random_prompts,
    reference_beams,
    reference_tokens,
)

pytestmark = pytest.mark.timeout(400)  # processes start several times, and the machine may be slow
BLOCK_SIZE, BUDGET, MAX_TOKENS = 8, 24, 120
NUM_BLOCKS = 60  # too few for the streams that run at once: sequences give way
MAX_ROUNDS = 5  # until enough streams run at once for one to give way
PROMPTS = random_prompts(4, longest=90, seed=2)
PROMPT = PROMPTS[-1]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Cluster]]:
    directory = tmp_path_factory.mktemp("gated")
    path = make_family_model(
        directory / "model", "qwen3_5_moe", vocab_size=VOCAB_SIZE, max_position_embeddings=512, pad_token_id=0
    )
    for name in TOKENIZER_FILES:
        shutil.copy(EMBEDDED_MODEL / name, path)
    settings = {
        "model.path": path,
        "scheduler.max_num_batched_tokens": BUDGET,
        "scheduler.max_num_seqs": 4,
        "scheduler.max_beam_width": 3,
        "scheduler.policy": "max_utilization",
        "attention.block_size": BLOCK_SIZE,
        "attention.num_blocks": NUM_BLOCKS,
    }
    with running_cluster(directory, *(f"{key}={value}" for key, value in settings.items()), is_warm=True) as cluster:
        yield path, cluster
        cluster.wait_idle()


def num_computed(cluster: Cluster, message: gateway_pb2.GenerateRequest, expected: Sequence[Sequence[int]]) -> int:
    """How many tokens the attention worker computes for an answer, which must be the expected one."""
    before = cluster.wait_idle().num_computed_tokens
    response = cluster.gateway.Generate(message, timeout=REQUEST_TIMEOUT_S)
    assert [list(each.token_ids) for each in response.completions] == [list(each) for each in expected]
    return cluster.wait_idle().num_computed_tokens - before


def test_streams_go_on_where_they_gave_way_and_after_the_dense_worker_was_replaced(
    server: tuple[Path, Cluster],
) -> None:
    path, cluster = server
    messages = [request(prompt, MAX_TOKENS, ignore_eos=True) for prompt in PROMPTS]
    expected = [reference_tokens(path, prompt, MAX_TOKENS) for prompt in PROMPTS]

    def replace() -> None:
        replacement = ctl(cluster, "replace-dense")
        assert replacement.returncode == 0, replacement.stderr

    for _ in range(MAX_ROUNDS):
        found = collect_all(cluster.gateway, messages)
        assert [each.token_ids[0] for each in found] == expected
        cluster.wait_idle()
        if cluster.dense_status().num_preemptions:
            break
    assert cluster.dense_status().num_preemptions, "the cache was meant to be too small"
    found = collect_all(cluster.gateway, messages, replace)  # the new worker counts from 0
    assert [each.token_ids[0] for each in found] == expected
    cluster.wait_idle()


def test_several_answers_each_compute_the_prompt(server: tuple[Path, Cluster]) -> None:
    path, cluster = server
    expected = reference_tokens(path, PROMPTS[1], 12)
    num_computed(cluster, request(PROMPTS[1], 12, n=3, ignore_eos=True), [expected] * 3)


def test_the_end_of_a_prompt_and_of_its_answer_is_found_again(server: tuple[Path, Cluster]) -> None:
    """The states at the ends of their last full blocks are kept."""
    path, cluster = server
    prompt = random_prompts(2, longest=77, seed=11)[1]
    answer = reference_tokens(path, prompt, 30)
    first = num_computed(cluster, request(prompt, 30, ignore_eos=True), [answer])
    assert first >= len(prompt)
    again = num_computed(cluster, request(prompt, 30, ignore_eos=True), [answer])
    assert again <= BLOCK_SIZE + 30
    longer = [*prompt, *answer, 5, 6, 7]
    next_answer = reference_tokens(path, longer, 10)
    assert num_computed(cluster, request(longer, 10, ignore_eos=True), [next_answer]) <= 2 * BLOCK_SIZE + 3 + 10


def test_beams_share_the_states_of_their_prompt(server: tuple[Path, Cluster]) -> None:
    path, cluster = server
    message = gateway_pb2.GenerateRequest(
        best_of=3, n=3, max_tokens=12, beam_search=sampling_pb2.BeamSearch(length_penalty=1.0)
    )
    message.prompt_token_ids.ids.extend(PROMPT)
    expected = reference_beams(path, PROMPT, 3, 12, None)
    assert num_computed(cluster, message, [token_ids for token_ids, _ in expected]) <= len(PROMPT) + 4 * 12
