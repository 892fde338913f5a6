"""Greedy streams of one small model on GPUs, in float32, beside Hugging Face's, while a process is killed."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
from collections.abc import Iterator
from pathlib import Path

from tests.support.clients.streams import collect_all
from tests.support.cluster import Cluster, request, running_cluster
from tests.support.rank_processes import pid_of
from tests.support.reference import random_prompts, reference_tokens

PROMPTS = random_prompts(6, longest=150, seed=6)
NUM_TOKENS = 300
MESSAGES = [request(prompt, NUM_TOKENS, ignore_eos=True) for prompt in PROMPTS]


@contextlib.contextmanager
def small_cluster(path: Path, directory: Path, *overrides: str) -> Iterator[Cluster]:
    """A cluster with the model, whose graphs are captured when they are first needed."""
    settings = (f"model.path={path}", "model.dtype=float32", "scheduler.max_num_seqs=8", "attention.num_blocks=400")
    lazily = ("dense.captures_lazily=true", "attention.captures_lazily=true")
    with running_cluster(directory, *settings, *lazily, *overrides) as cluster:
        yield cluster


@functools.cache
def expected_tokens(path: Path) -> list[list[int]]:
    """Hugging Face's, of each prompt alone."""
    return [reference_tokens(path, prompt, NUM_TOKENS) for prompt in PROMPTS]


def tokens_of(cluster: Cluster, killed: str | None = None) -> list[list[int]]:
    """The tokens of all prompts at once, while the process of this name, if any, is killed; then nothing is left."""

    def kill() -> None:
        if killed is not None:
            os.kill(pid_of(cluster, killed), signal.SIGKILL)

    collected = collect_all(cluster.gateway, MESSAGES, kill)
    cluster.wait_idle()
    return [each.token_ids[0] for each in collected]
