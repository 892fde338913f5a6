"""Families with parts of their own in both workers: killed workers lose no soft cap, position or expert."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.common.config import EMBEDDED_MODEL
from tests.support.clients.over_deaths import check_over_deaths
from tests.support.cluster import request
from tests.support.dense.family_models import VARIANTS, make_family_model
from tests.support.plain_services import PlainServices, plain_services
from tests.support.reference import TOKENIZER_FILES, VOCAB_SIZE, random_prompts, reference_tokens

pytestmark = pytest.mark.timeout(400)  # processes start several times, and the machine may be slow
MAX_TOKENS = 90


# What only they keep or hand over: shared keys and inputs of layers, latent keys, states and their weights, and what is
# kept between the two parts of a layer of Mamba 1. Sinks and windows are in `test_layer_group_survival.py`. In one
# process all families go on with new weights and with a new cache (`tests/unit/families/test_families.py`); by clusters
# the others run with --all-families.
VARIED = ["gemma4-shared", "deepseek_v3", "qwen3_next", "jamba"]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    variants = VARIED
    if metafunc.config.getoption("--all-families"):  # with longrope, transformers turns keys again as texts grow
        variants = [variant for variant in VARIANTS if variant != "phi3-longrope"]
    metafunc.parametrize("served", variants, indirect=True, scope="module")


@pytest.fixture(scope="module")
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Path, PlainServices]]:
    path = tmp_path_factory.mktemp(request.param)
    length = "max_seq_len" if request.param.startswith("mpt") else "max_position_embeddings"
    make_family_model(path, request.param, **{"vocab_size": VOCAB_SIZE, length: 256})
    for name in TOKENIZER_FILES:
        shutil.copy(EMBEDDED_MODEL / name, path)
    settings = (
        f"model.path={path}",
        "scheduler.max_num_batched_tokens=24",
        "scheduler.max_num_seqs=8",
        "attention.block_size=8",
    )
    with plain_services(tmp_path_factory.mktemp("services"), *settings) as services:
        yield path, services


def test_streams_of_each_family_equal_hugging_face_over_the_death_of_each_worker(
    served: tuple[Path, PlainServices],
) -> None:
    path, services = served
    prompts = random_prompts(3, longest=60, seed=2)
    messages = [request(prompt, MAX_TOKENS, ignore_eos=True) for prompt in prompts]
    expected = [reference_tokens(path, prompt, MAX_TOKENS) for prompt in prompts]
    check_over_deaths(services, messages, expected)
