"""Two ranks on two GPUs with standbys: whichever process dies, its standby takes over and the tokens stay the same."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.gpu.gpu_streams import MESSAGES, expected_tokens, small_cluster
from tests.support.clients.streams import collect_all
from tests.support.cluster import Cluster
from tests.support.rank_processes import PROCESSES, STANDBYS, ready_pids

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(400),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="each rank needs a GPU of its own"),
]

ARRANGEMENTS = {
    "tensor": ("dense.tensor_parallel_size=2",),
    "pipeline": ("dense.pipeline_parallel_size=2",),
    "tier": ("dense.tensor_parallel_size=2", f"attention.host_kv_bytes={2**26}"),
}


@pytest.fixture(scope="module", params=ARRANGEMENTS)
def cluster(
    request: pytest.FixtureRequest, llama_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    directory = tmp_path_factory.mktemp("standbys")
    with small_cluster(llama_path, directory, *ARRANGEMENTS[request.param], *STANDBYS) as cluster:
        yield cluster


@pytest.mark.parametrize("name", PROCESSES)
def test_the_standby_of_a_killed_process_goes_on(cluster: Cluster, llama_path: Path, name: str) -> None:
    before = ready_pids(cluster)
    collected = collect_all(cluster.gateway, MESSAGES, lambda: os.kill(before[name], signal.SIGKILL))
    assert [each.token_ids[0] for each in collected] == expected_tokens(llama_path)
    after = ready_pids(cluster, [before[name]])
    changed = {each: after[each] for each in PROCESSES if after[each] != before[each]}
    assert changed == {name: before[f"standby of {name}"]}, "its standby took over, and the others live on"
    cluster.wait_idle()
