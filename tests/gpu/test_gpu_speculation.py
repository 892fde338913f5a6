"""Speculation on a GPU: the answers are those without it, also over a kill."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from tests.gpu.gpu_cluster import gpu_cluster
from tests.support.clients.streams import collect_all
from tests.support.cluster import Cluster, request

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

MAX_TOKENS = 200
REPEATING = "one two three four five six seven eight. " * 4
# In float32 the tokens do not depend on the size of a step.
MESSAGES = [
    request(prompt, MAX_TOKENS, ignore_eos=True, temperature=temperature, seed=7)
    for prompt in (REPEATING, "San Francisco is a")
    for temperature in (0.0, 1.0)
]


def token_ids(cluster: Cluster, *, kills: bool = False) -> list[dict[int, list[int]]]:
    def kill() -> None:
        os.kill(cluster.pid_of("dense_worker"), signal.SIGKILL)

    return [dict(each.token_ids) for each in collect_all(cluster.gateway, MESSAGES, *((kill,) if kills else ()))]


def test_answers_are_those_without_speculation(tmp_path: Path) -> None:
    for name in ("off", "on"):
        (tmp_path / name).mkdir()
    with gpu_cluster(tmp_path / "off", "model.dtype=float32") as cluster:
        expected = token_ids(cluster)
    step_log = tmp_path / "steps"
    settings = "model.dtype=float32", "scheduler.speculation=suffix", f"dense.step_log={step_log}"
    with gpu_cluster(tmp_path / "on", *settings) as cluster:
        assert [token_ids(cluster) for _ in range(3)] == [expected] * 3
        assert token_ids(cluster, kills=True) == expected
    steps = [json.loads(line) for line in step_log.read_text().splitlines()]
    # How many do depends on what they bring by the clock: a small model's steps are so short that it may be nothing.
    assert any(step["num_sampled"] > step["num_seqs"] > 0 for step in steps), "no step has verified drafts"
