"""Heads that draft beside the first of two ranks: the tokens of one rank, in fewer steps, also over a kill."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from tests.support.clients.streams import collect, collect_all
from tests.support.cluster import Cluster, request, running_cluster
from tests.support.dense.eagle_head import head_that_knows
from tests.support.dense.medusa_heads import heads_that_know
from tests.support.rank_processes import pid_of

pytestmark = pytest.mark.timeout(400)  # processes start twice, and the machine may be slow

PROMPT, NUM_TOKENS, NUM_DRAFTS = "San Francisco is a", 20, 3
HEADS = {"medusa": heads_that_know, "eagle3": head_that_knows}  # the second reads all of the embedding
MODULES = {"services.dense_worker": "tests.support.workers.speculating_dense_worker"}  # of the first rank


@pytest.mark.parametrize("kind", HEADS)
def test_heads_draft_what_they_know(kind: str, cluster: Cluster, tmp_path: Path) -> None:
    message = request(PROMPT, NUM_TOKENS + NUM_DRAFTS, ignore_eos=True)
    answer = collect(cluster.gateway, message).token_ids[0]
    heads, step_log = HEADS[kind](tmp_path / "heads", PROMPT, answer, NUM_DRAFTS), tmp_path / "steps"
    drafts = f"scheduler.speculation={kind}", f"scheduler.speculation_model={heads}", f"dense.step_log={step_log}"
    settings = "dense.tensor_parallel_size=2", *drafts
    with running_cluster(tmp_path, *settings, modules=MODULES, is_warm=True) as ranks:
        assert collect(ranks.gateway, message).token_ids[0] == answer
        ranks.wait_idle()
        steps = [json.loads(line) for line in step_log.read_text().splitlines()]
        num_steps = sum(step.get("num_seqs", 0) > 0 for step in steps)
        assert num_steps < NUM_TOKENS * 3 / 4, "drafts were meant to be right"
        pid = pid_of(ranks, "dense_worker-1")
        [disturbed] = collect_all(ranks.gateway, [message], lambda: os.kill(pid, signal.SIGKILL))
        assert disturbed.token_ids[0] == answer
        ranks.wait_idle()
