"""Standbys on a GPU take over from killed workers: the tokens are those without kills, and the GPU goes on."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.gpu.gpu_cluster import DEVICE, WORKERS, assert_mps_clients, gpu_cluster
from tests.gpu.test_gpu_survival import MESSAGES, NUM_TOKENS, PROMPTS, settings
from tests.integration.survival.test_standby import ready_pids
from tests.support.clients.streams import Collected, collect_all
from tests.support.cluster import Cluster, free_port
from tests.support.reference import reference_tokens
from tests.support.scrape import Scrape

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(400)]

NUM_KILLS = 3


@pytest.fixture(scope="module")
def metrics_address() -> str:
    return f"127.0.0.1:{free_port()}"


@pytest.fixture(scope="module")
def cluster(llama_path: Path, metrics_address: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    standbys = ("launch.standby_dense=loaded", "launch.standby_attention=imports", "launch.max_restarts=100")
    tier = f"attention.host_kv_bytes={2**28}"
    directory = tmp_path_factory.mktemp("cluster")
    with gpu_cluster(directory, *settings(llama_path, metrics_address), *standbys, tier) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def undisturbed(llama_path: Path, cluster: Cluster) -> list[Collected]:
    collected = collect_all(cluster.gateway, MESSAGES)
    assert collected[0].token_ids[0] == reference_tokens(llama_path, PROMPTS[0], NUM_TOKENS, DEVICE)
    return collected


@pytest.mark.parametrize("killed", [WORKERS[:1], WORKERS[1:], WORKERS])
def test_streams_end_as_without_kills(
    cluster: Cluster, metrics_address: str, undisturbed: list[Collected], killed: Sequence[str]
) -> None:
    for _ in range(NUM_KILLS):
        before = ready_pids(cluster)
        num_recovered = Scrape(metrics_address).value("twostroke_gateway_recovered_sequences_total")

        def kill(pids: dict[str, int] = before) -> None:
            for role in killed:
                os.kill(pids[role], signal.SIGKILL)

        for collected, expected in zip(collect_all(cluster.gateway, MESSAGES, kill), undisturbed, strict=True):
            collected.assert_equals(expected)
        assert Scrape(metrics_address).value("twostroke_gateway_recovered_sequences_total") > num_recovered
        after = ready_pids(cluster)
        for role in WORKERS:
            assert after[role] == before[f"standby of {role}" if role in killed else role]
    assert_mps_clients(cluster)
