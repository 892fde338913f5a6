"""Sequences larger than one attention worker's cache give the tokens of Hugging Face, also when a worker dies."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from services.pb import gateway_pb2
from tests.support.clients.streams import collect_all
from tests.support.cluster import Cluster, request, running_cluster
from tests.support.rank_processes import pid_of
from tests.support.reference import VOCAB_SIZE, make_served_model, reference_tokens

pytestmark = pytest.mark.timeout(400)  # processes start several times, and the machine may be slow

BLOCK_SIZE, NUM_BLOCKS = 8, 10  # of each of three workers: 80 tokens
# Tokens of prompts and outputs: the first three run beside each other, the first one in two workers; the last one is in
# all three, and begins when the others have ended.
SIZES = ((100, 40), (20, 30), (15, 25), (75, 20), (140, 90))
PROCESSES = ("dense_worker", "attn_worker", "attn_worker-1", "attn_worker-2")
LIMITS = ("scheduler.max_num_batched_tokens=64", "scheduler.max_num_seqs=8", "scheduler.policy=max_utilization")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_served_model(tmp_path_factory.mktemp("split") / "model", "llama")


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    rng = random.Random(5)
    return [[rng.randrange(3, VOCAB_SIZE) for _ in range(length)] for length, _ in SIZES]


@pytest.fixture(scope="module")
def messages(prompts: list[list[int]]) -> list[gateway_pb2.GenerateRequest]:
    return [request(prompt, most, ignore_eos=True) for prompt, (_, most) in zip(prompts, SIZES, strict=True)]


@pytest.fixture(scope="module")
def expected(model: Path, prompts: list[list[int]]) -> list[list[int]]:
    return [reference_tokens(model, prompt, most) for prompt, (_, most) in zip(prompts, SIZES, strict=True)]


def settings(model: Path, *others: str) -> list[str]:
    sizes = (f"attention.block_size={BLOCK_SIZE}", f"attention.num_blocks={NUM_BLOCKS}")
    return [f"model.path={model}", "attention.workers=3", "attention.split_context=true", *sizes, *LIMITS, *others]


@pytest.fixture(scope="module")
def split(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[Cluster]:
    with running_cluster(tmp_path_factory.mktemp("workers"), *settings(model), is_warm=True) as cluster:
        yield cluster


def test_tokens_are_those_of_hugging_face_whatever_the_size(
    split: Cluster, messages: list[gateway_pb2.GenerateRequest], expected: list[list[int]]
) -> None:
    assert [each.token_ids[0] for each in collect_all(split.gateway, messages)] == expected
    split.wait_idle()


def test_each_worker_has_a_part_of_what_needs_all_of_them(
    split: Cluster, messages: list[gateway_pb2.GenerateRequest]
) -> None:
    seen = set[tuple[int, ...]]()
    while (1, 1, 1) not in seen:  # on a busy machine a stream may end before anybody looks
        stream = split.gateway.GenerateStream(messages[-1])
        for _ in stream:
            seen.add(tuple(each.num_sequences for each in split.dense_status().attention_workers))
    split.wait_idle()


def test_what_is_longer_than_all_caches_together_is_refused_with_both_numbers(split: Cluster) -> None:
    with pytest.raises(grpc.RpcError, match="maximum context length is 240 tokens, but at least 246 were requested"):
        split.generate([5] * 245, 1)
    with pytest.raises(grpc.RpcError, match="the largest cache has 10, and one of several answers to a prompt is not"):
        split.generate([5] * 100, 20, n=2, temperature=1.0)


def test_clients_that_go_away_leave_no_part_behind(
    split: Cluster, messages: list[gateway_pb2.GenerateRequest], expected: list[list[int]]
) -> None:
    streams = [split.gateway.GenerateStream(messages[-1]) for _ in range(6)]  # each needs all caches
    next(iter(streams[0]))
    for stream in streams[:5]:
        stream.cancel()
    assert [token for chunk in streams[5] for token in chunk.token_ids] == expected[-1]
    split.wait_idle()


@pytest.mark.parametrize("name", PROCESSES)
def test_streams_end_as_without_the_kill(
    split: Cluster, messages: list[gateway_pb2.GenerateRequest], expected: list[list[int]], name: str
) -> None:
    for chosen in (slice(0, 3), slice(0, 5)):
        pid = pid_of(split, name)
        disturbed = collect_all(split.gateway, messages[chosen], lambda pid=pid: os.kill(pid, signal.SIGKILL))
        assert [each.token_ids[0] for each in disturbed] == expected[chosen]
        assert pid_of(split, name) != pid
        split.wait_idle()


def test_a_worker_with_a_part_that_hangs_is_found(
    tmp_path: Path, model: Path, messages: list[gateway_pb2.GenerateRequest], expected: list[list[int]]
) -> None:
    with running_cluster(tmp_path, *settings(model, "watchdog.stall_timeout_s=5"), is_warm=True) as cluster:
        pid = pid_of(cluster, "attn_worker-1")
        disturbed = collect_all(cluster.gateway, messages, lambda: os.kill(pid, signal.SIGSTOP))
        assert [each.token_ids[0] for each in disturbed] == expected
        cluster.wait_idle()
