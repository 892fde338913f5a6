"""MeasuredDrafting on a GPU: the answers are those without it, also over a kill."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
import torch

from services.dense_worker.features.drafting.device_drafter import last_rows
from services.dense_worker.features.drafting.medusa.heads import MedusaHeads, ResidualBlocks
from services.step import PlanEntry
from tests.gpu.gpu_cluster import gpu_cluster
from tests.support.clients.streams import collect_all
from tests.support.cluster import Cluster, request
from tests.support.dense.medusa_heads import heads_that_know, random_heads

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


def test_answers_are_those_without_medusa_heads(tmp_path: Path) -> None:
    """The heads know the greedy answer to the second prompt, and are wrong for nearly all other texts."""
    for name in ("off", "on"):
        (tmp_path / name).mkdir()
    with gpu_cluster(tmp_path / "off", "model.dtype=float32") as cluster:
        expected = token_ids(cluster)
    path = heads_that_know(tmp_path / "heads", "San Francisco is a", expected[2][0], num_heads=4)
    step_log = tmp_path / "steps"
    settings = "model.dtype=float32", "scheduler.speculation=medusa", f"scheduler.speculation_model={path}"
    with gpu_cluster(tmp_path / "on", *settings, f"dense.step_log={step_log}") as cluster:
        known = [collect_all(cluster.gateway, MESSAGES[2:3])[0].token_ids[0] for _ in range(5)]
        assert known == [expected[2][0]] * 5
        assert [token_ids(cluster) for _ in range(2)] == [expected] * 2
        assert token_ids(cluster, kills=True) == expected
    steps = [json.loads(line) for line in step_log.read_text().splitlines()]
    assert any(step["num_sampled"] > step["num_seqs"] > 0 for step in steps), "no step has verified drafts"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("num_rows", [1, 5, 64])
def test_heads_draft_on_a_gpu_as_on_a_cpu(dtype: torch.dtype, num_rows: int) -> None:
    """Where two tokens are about as likely, rounding may choose either."""
    plain = random_heads(3, 256, 1000)

    def make(device: str, dtype: torch.dtype) -> MedusaHeads:
        def stack(tensors: list[torch.Tensor]) -> torch.Tensor:
            return torch.stack(tensors).to(device, dtype)

        weights, biases = (stack([head.blocks[0][i] for head in plain]) for i in (0, 1))
        return MedusaHeads([ResidualBlocks(weights, biases[:, None])], stack([head.lm_head for head in plain]))

    hidden = torch.randn(num_rows, 256, generator=torch.Generator().manual_seed(1)).to(dtype)
    found = make("cuda", dtype).draft(hidden.cuda()).cpu()
    exact = make("cpu", torch.float64)
    x = exact.blocks[0].forward(hidden.double().expand(3, -1, -1))
    logits = torch.bmm(x, exact.lm_head.transpose(1, 2)).transpose(0, 1)
    lost = logits.max(-1).values - logits.gather(2, found[:, :, None])[:, :, 0]
    assert lost.max() <= {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.02}[dtype] * logits.abs().max()


def test_the_last_rows_are_found_on_a_gpu() -> None:
    drafts = [(), (7, 8), (7, 8), (5,)]
    entries = [PlanEntry(seq_id, 0, 1 + len(each), 1 + len(each), each) for seq_id, each in enumerate(drafts)]
    sampled = torch.tensor([1, 7, 9, 3, 7, 8, 6, 4, 2])
    assert last_rows(entries, sampled.cuda()).tolist() == last_rows(entries, sampled).tolist() == [0, 2, 6, 7]


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
