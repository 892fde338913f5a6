"""Models in which some layers have a window, many times beyond it: right tokens over the death of each worker.

The layers with a window have blocks of their own, far fewer than the others.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.common.config import EMBEDDED_MODEL
from tests.support.clients.over_deaths import check_over_deaths
from tests.support.cluster import free_port, request
from tests.support.dense.family_models import make_family_model
from tests.support.plain_services import PlainServices, plain_services
from tests.support.reference import TOKENIZER_FILES, VOCAB_SIZE, random_prompts, reference_tokens
from tests.support.scrape import Scrape

pytestmark = pytest.mark.timeout(400)  # processes start several times, and the machine may be slow
BLOCK_SIZE, BUDGET, MAX_NUM_SEQS, NUM_BLOCKS, MAX_TOKENS = 8, 24, 4, 150, 100
WINDOW = 6  # of both models
NUM_WINDOW_BLOCKS = MAX_NUM_SEQS * (1 + 3) + (3 * BUDGET + 2 * MAX_NUM_SEQS) // BLOCK_SIZE
PROMPT = random_prompts(2, longest=140, seed=5)[1]


@pytest.fixture(scope="module", params=["gemma3", "gpt_oss"])
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Path, PlainServices, str]]:
    path = tmp_path_factory.mktemp(request.param)
    make_family_model(path, request.param, vocab_size=VOCAB_SIZE, max_position_embeddings=256)
    for name in TOKENIZER_FILES:
        shutil.copy(EMBEDDED_MODEL / name, path)
    metrics = f"127.0.0.1:{free_port()}"
    settings = (
        f"model.path={path}",
        f"scheduler.max_num_batched_tokens={BUDGET}",
        f"scheduler.max_num_seqs={MAX_NUM_SEQS}",
        f"attention.block_size={BLOCK_SIZE}",
        f"attention.num_blocks={NUM_BLOCKS}",
        f"attention.metrics_address={metrics}",
    )
    with plain_services(tmp_path_factory.mktemp("services"), *settings) as services:
        yield path, services, metrics


def test_streams_equal_hugging_face_over_the_death_of_each_worker(
    served: tuple[Path, PlainServices, str],
) -> None:
    path, services, metrics = served
    prompts = [PROMPT, *random_prompts(2, longest=50, seed=2)]
    messages = [request(prompt, MAX_TOKENS, ignore_eos=True) for prompt in prompts]
    expected = [reference_tokens(path, prompt, MAX_TOKENS) for prompt in prompts]
    check_over_deaths(services, messages, expected)
    scrape = Scrape(metrics)
    num_windows = scrape.value("twostroke_attention_kv_window_blocks")
    assert num_windows == NUM_WINDOW_BLOCKS < scrape.value("twostroke_attention_kv_blocks") == NUM_BLOCKS
    assert scrape.value("twostroke_attention_kv_window_blocks", state="used") == 0


def test_answers_to_one_prompt_share_it_and_its_end_is_found_again(served: tuple[Path, PlainServices, str]) -> None:
    path, services, _ = served
    expected = reference_tokens(path, PROMPT, 2 * WINDOW)
    num_computed = []
    for num_answers in (1, 3):
        before = services.attention_status().num_computed_tokens
        response = services.gateway.Generate(
            request(PROMPT, 2 * WINDOW, n=num_answers, ignore_eos=True), timeout=200.0
        )
        assert [list(each.token_ids) for each in response.completions] == [expected] * num_answers
        num_computed.append(services.wait_idle().num_computed_tokens - before)
    assert num_computed[1] <= 3 * (BLOCK_SIZE + 2 * WINDOW + 1), "the prompt's blocks and last window are there"
