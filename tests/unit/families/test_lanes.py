"""Greedy tokens of two lanes equal Hugging Face's: dense families, experts, windows, shared prefixes, preemption."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from services.attn_worker.kv_events.kv_events import KVEvents, Removed, Stored
from services.channel.turns import Turns
from services.common.config import Config
from tests.support.dense.family_models import make_family_model
from tests.support.lane_pair import TIMEOUT_S, check_shared_prefix_and_preemption, lane_pair
from tests.support.reference import VOCAB_SIZE, random_prompts, reference_tokens

torch.set_num_threads(1)
MAX_TOKENS = 24


def config_of(path: Path, *, num_blocks: int = 96, kv_cache_dtype: str = "auto", **scheduler: object) -> Config:
    cache = {"block_size": 8, "num_blocks": num_blocks, "kv_cache_dtype": kv_cache_dtype}
    attention = {**cache, "num_threads": 1}
    sizes = {"num_lanes": 2, "max_num_seqs": 16, "max_num_batched_tokens": 24, **scheduler}
    sections = {"model": {"path": path}, "dense": {"num_threads": 1}, "attention": attention, "scheduler": sizes}
    return Config.model_validate(sections)


def make(path: Path, variant: str) -> Path:
    make_family_model(path, variant, vocab_size=VOCAB_SIZE, max_position_embeddings=256)
    return path


@pytest.mark.parametrize("variant", ["smollm3", "mixtral", "gemma2", "deepseek_v2"])
def test_tokens_of_each_family_equal_hugging_face(tmp_path: Path, variant: str) -> None:
    path = make(tmp_path, variant)
    prompts = dict(enumerate(random_prompts(8, longest=60, seed=3), start=1))
    expected = {seq_id: reference_tokens(path, prompt, MAX_TOKENS) for seq_id, prompt in prompts.items()}
    with lane_pair(config_of(path)) as pair:
        assert pair.generate(prompts, MAX_TOKENS) == expected


def test_prompts_that_share_a_prefix_and_sequences_that_are_preempted_keep_their_tokens(tmp_path: Path) -> None:
    path = make(tmp_path, "smollm3")
    with lane_pair(config_of(path, policy="max_utilization", num_blocks=36)) as pair:
        check_shared_prefix_and_preemption(pair, path)


@pytest.mark.parametrize("kv_cache_dtype", ["int8", "fp8"])
def test_a_cache_of_8_bits_gives_the_tokens_of_one_lane(tmp_path: Path, kv_cache_dtype: str) -> None:
    path = make(tmp_path, "smollm3")
    prompts = dict(enumerate(random_prompts(6, longest=40, seed=7), start=1))
    found = []
    for num_lanes in (1, 2):
        with lane_pair(config_of(path, num_lanes=num_lanes, kv_cache_dtype=kv_cache_dtype)) as pair:
            found.append(pair.generate(prompts, MAX_TOKENS))
    assert found[0] == found[1]


def test_events_name_the_blocks_that_can_be_found(tmp_path: Path) -> None:
    """Sequences share a prefix, and so few blocks are there that some are overwritten."""
    path, events = make(tmp_path, "smollm3"), KVEvents()
    (prefix,) = random_prompts(1, longest=40, seed=4)
    prompts = {seq_id: [*prefix, *tail] for seq_id, tail in enumerate(random_prompts(12, longest=12, seed=5), start=1)}
    stored, reported = set[bytes](), set[bytes]()
    with lane_pair(config_of(path, policy="max_utilization", num_blocks=36), events) as pair:
        pair.generate(prompts, MAX_TOKENS)
        pair.engine.stop(TIMEOUT_S)
        pool = pair.attention.submit(lambda: pair.attention.cache.pools["blocks"]).result(TIMEOUT_S)
        taken = events.take()
        for event in taken:
            if isinstance(event, Stored):
                assert not reported & set(event.digests)
                stored |= set(event.digests)
                reported |= set(event.digests)
            elif isinstance(event, Removed):
                reported.remove(event.digest)
            else:
                reported.clear()
        assert reported == {digest for digest in stored if pool.lookup(digest) is not None} != stored


def test_both_workers_compute_a_step_of_one_lane_while_the_other_one_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each thread runs layers of one lane between two layers of a step of the other one."""
    parts: dict[threading.Thread, list[object]] = {}
    go_on = Turns.go_on

    def recorded(turns: Turns) -> bool:
        lanes = {channel: lane[0] for channel, lane in turns._lanes.items() if lane}
        has_run = go_on(turns)
        if has_run:
            channel = next(reversed(turns._lanes))  # whose turn was last
            parts.setdefault(threading.current_thread(), []).append(lanes[channel])
        return has_run

    monkeypatch.setattr(Turns, "go_on", recorded)
    path = make(tmp_path, "smollm3")
    prompts = dict(enumerate(random_prompts(8, longest=20, seed=6), start=1))
    with lane_pair(config_of(path)) as pair:
        pair.generate(prompts, MAX_TOKENS)
    assert len(parts) == 2
    for turns in parts.values():
        between = sum(a is c and a is not b for a, b, c in zip(turns, turns[1:], turns[2:], strict=False))
        assert between > len(turns) / 4, f"{between} of {len(turns)} parts lie between two of another step"
