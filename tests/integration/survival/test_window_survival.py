"""Streams far beyond the window of a model: the right tokens, in few blocks, over the death of each worker."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.clients.over_deaths import check_over_deaths
from tests.support.cluster import request
from tests.support.plain_services import PlainServices, plain_services
from tests.support.reference import make_served_model, random_prompts, reference_tokens

pytestmark = pytest.mark.timeout(400)  # processes start several times, and the machine may be slow
WINDOW, BLOCK_SIZE, BUDGET, MAX_TOKENS = 20, 8, 24, 110
NUM_BLOCKS = 36  # for three sequences of 111 to 170 tokens 53 would be needed without windows


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, PlainServices]]:
    path = make_served_model(tmp_path_factory.mktemp("mistral"), "mistral", sliding_window=WINDOW)
    settings = (
        f"model.path={path}",
        f"scheduler.max_num_batched_tokens={BUDGET}",
        "scheduler.max_num_seqs=8",
        f"attention.block_size={BLOCK_SIZE}",
        f"attention.num_blocks={NUM_BLOCKS}",
    )
    with plain_services(tmp_path_factory.mktemp("services"), *settings) as services:
        yield path, services


def test_long_streams_equal_hugging_face_over_the_death_of_each_worker(served: tuple[Path, PlainServices]) -> None:
    path, services = served
    prompts = random_prompts(3, longest=60, seed=2)
    messages = [request(prompt, MAX_TOKENS, ignore_eos=True) for prompt in prompts]
    expected = [reference_tokens(path, prompt, MAX_TOKENS) for prompt in prompts]
    check_over_deaths(services, messages, expected)


def test_a_prompt_longer_than_the_cache_is_answered_and_its_end_is_found_again(
    served: tuple[Path, PlainServices],
) -> None:
    path, services = served
    prompt = random_prompts(2, longest=400, seed=3)[1]
    assert len(prompt) > NUM_BLOCKS * BLOCK_SIZE
    expected = reference_tokens(path, prompt, 30)
    num_computed = []
    for _ in range(2):
        before = services.attention_status().num_computed_tokens
        assert services.generate(prompt, 30, ignore_eos=True).token_ids == expected
        num_computed.append(services.wait_idle().num_computed_tokens - before)
    assert num_computed[0] >= len(prompt)
    assert num_computed[1] <= BLOCK_SIZE + 30, "the blocks of the last window are still there, and suffice"
