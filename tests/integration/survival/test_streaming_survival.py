"""StreamingLLM: texts far beyond the trained length, in few blocks, with drafts, over the death of each worker."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.attention.streaming import streaming_tokens
from tests.support.clients.over_deaths import check_over_deaths
from tests.support.cluster import request
from tests.support.plain_services import PlainServices, plain_services
from tests.support.reference import make_served_model, random_prompts

pytestmark = pytest.mark.timeout(400)  # processes start several times, and the machine may be slow
TRAINED, SINKS, WINDOW, BLOCK_SIZE, MAX_TOKENS = 48, 4, 24, 8, 110
NUM_BLOCKS = 45  # for three sequences of 111 to 200 tokens 59 would be needed otherwise


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, PlainServices]]:
    path = make_served_model(tmp_path_factory.mktemp("llama"), "llama", max_position_embeddings=TRAINED)
    settings = (
        f"model.path={path}",
        "model.max_model_len=1000",
        "scheduler.max_num_batched_tokens=24",
        "scheduler.max_num_seqs=8",
        "scheduler.speculation=ngram",
        f"attention.block_size={BLOCK_SIZE}",
        f"attention.num_blocks={NUM_BLOCKS}",
        f"attention.sink_tokens={SINKS}",
        f"attention.window={WINDOW}",
    )
    with plain_services(tmp_path_factory.mktemp("services"), *settings) as services:
        yield path, services


def test_long_streams_equal_the_paper_over_the_death_of_each_worker(served: tuple[Path, PlainServices]) -> None:
    path, services = served
    prompts = random_prompts(3, longest=90, seed=2)
    messages = [request(prompt, MAX_TOKENS, ignore_eos=True) for prompt in prompts]
    expected = [streaming_tokens(path, prompt, MAX_TOKENS, SINKS, WINDOW) for prompt in prompts]
    check_over_deaths(services, messages, expected)


def test_a_cached_prefix_is_used_with_its_sinks_and_its_last_window(served: tuple[Path, PlainServices]) -> None:
    path, services = served
    prompt = random_prompts(2, longest=500, seed=3)[1]
    assert len(prompt) > NUM_BLOCKS * BLOCK_SIZE
    num_computed = []
    for ending in ([], [5, 6, 7]):
        before = services.attention_status().num_computed_tokens
        expected = streaming_tokens(path, prompt + ending, 20, SINKS, WINDOW)
        assert services.generate(prompt + ending, 20, ignore_eos=True).token_ids == expected
        num_computed.append(services.wait_idle().num_computed_tokens - before)
    assert num_computed[0] >= len(prompt)
    assert num_computed[1] < 100, "drafts included"
