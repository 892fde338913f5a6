"""A short flood of inputs for vectors; `python -m tests.chaos.vectors` has the largest requests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.vectors import Ask, check_round, draw_asks, undisturbed
from tests.support.cluster import running_cluster


@pytest.mark.timeout(400)  # it takes seconds on a quiet machine
def test_vectors_and_streams_survive_kills_under_a_flood(tmp_path: Path) -> None:
    asks: list[Ask] = draw_asks(2, 320)
    settings = ("model.runner=pooling", "model.num_layers=2", "launch.max_restarts=1000")
    with running_cluster(tmp_path, *settings, is_warm=True) as cluster:
        expected = undisturbed(cluster, asks)
        for killed in (("dense_worker",), ("attn_worker",)):
            before = cluster.attention_status().num_computed_tokens

            def kill(killed: tuple[str, ...] = killed, before: int = before) -> None:
                while cluster.attention_status().num_computed_tokens < before + 500:
                    pass
                cluster.kill(*killed)

            check_round(cluster, asks, expected, 1, kill)
