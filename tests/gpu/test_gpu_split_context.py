"""Sequences larger than one KV cache, on one GPU and on two: the tokens of Hugging Face in float32, whoever dies."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.support.clients.streams import collect_all
from tests.support.cluster import Cluster, running_cluster
from tests.support.cluster import request as generate_request
from tests.support.rank_processes import pid_of
from tests.support.reference import random_prompts, reference_tokens

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(400)]

BLOCK_SIZE, NUM_BLOCKS = 16, 20  # of each of three workers: 320 tokens
# Tokens of prompts and outputs: the first two are in two workers each, the last one is in all three, alone.
SIZES = ((300, 100), (20, 390), (90, 40), (30, 120), (600, 280))
SMALLER, LARGEST = slice(0, 4), slice(4, 5)
SETTINGS = (
    "model.dtype=float32",
    "attention.workers=3",
    "attention.split_context=true",
    f"attention.block_size={BLOCK_SIZE}",
    f"attention.num_blocks={NUM_BLOCKS}",
    "scheduler.max_num_seqs=8",
    "scheduler.max_num_batched_tokens=128",
    "dense.captures_lazily=true",
    "attention.captures_lazily=true",
)
# The GPUs of the attention workers in turn: with two, each sequence of these has parts on both.
DEVICES = {"one-gpu": (), "two-gpus": ('attention.devices=["cuda:0", "cuda:1"]',)}
PROMPTS = [random_prompts(2, longest=length, seed=length)[1] for length, _ in SIZES]
MESSAGES = [generate_request(prompt, most, ignore_eos=True) for prompt, (_, most) in zip(PROMPTS, SIZES, strict=True)]


@pytest.fixture(scope="module")
def expected(llama_path: Path) -> list[list[int]]:
    return [reference_tokens(llama_path, prompt, most) for prompt, (_, most) in zip(PROMPTS, SIZES, strict=True)]


@pytest.fixture(scope="module", params=DEVICES)
def cluster(
    request: pytest.FixtureRequest, llama_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    if request.param == "two-gpus" and torch.cuda.device_count() < 2:
        pytest.skip(f"needs 2 GPUs, there is {torch.cuda.device_count()}")
    directory = tmp_path_factory.mktemp(f"split-{request.param}")
    with running_cluster(directory, f"model.path={llama_path}", *SETTINGS, *DEVICES[request.param]) as cluster:
        yield cluster


@pytest.mark.parametrize(
    ("name", "chosen"),
    [
        (None, slice(0, 5)),
        ("attn_worker-1", SMALLER),
        ("attn_worker", LARGEST),
        ("attn_worker-2", SMALLER),
        ("dense_worker", LARGEST),
        ("attn_worker-1", LARGEST),
    ],
)
def test_streams_are_those_of_hugging_face_whoever_dies(
    cluster: Cluster, expected: list[list[int]], name: str | None, chosen: slice
) -> None:
    def kill() -> None:
        if name is not None:
            os.kill(pid_of(cluster, name), signal.SIGKILL)

    collected = collect_all(cluster.gateway, MESSAGES[chosen], kill)
    assert [each.token_ids[0] for each in collected] == expected[chosen]
    cluster.wait_idle()
