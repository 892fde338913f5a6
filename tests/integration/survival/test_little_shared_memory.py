"""Workers die and are replaced although /dev/shm has room for only one data region, as in some containers."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator

import pytest

from services.common.config import Config, ModelSection
from services.common.resolve import resolve_model
from tests.support.clients.streams import Collected, collect_all
from tests.support.cluster import Cluster, ctl, request, running_cluster
from tests.support.models import TWO_LAYERS

pytestmark = pytest.mark.timeout(400)  # processes start and stop several times, and the machine may be slow

MODEL = resolve_model(ModelSection(), "cpu")
ROW_BYTES = (MODEL.config.qkv_size + MODEL.config.attn_size) * MODEL.dtype.itemsize
REGION_BYTES = Config().scheduler.max_num_batched_tokens * ROW_BYTES
SHM_BYTES = 3 * REGION_BYTES // 2
NAMESPACES = (["unshare", "--mount"], ["unshare", "--map-root-user", "--mount"])
MESSAGES = [request("Count", 500, temperature=0.9, seed=seed, ignore_eos=True) for seed in range(4)]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    mount = ["sh", "-c", f'mount -t tmpfs -o size={SHM_BYTES} tmpfs /dev/shm && exec "$@"', "sh"]
    for namespace in NAMESPACES:
        if subprocess.run([*namespace, *mount, "true"], capture_output=True).returncode == 0:
            directory = tmp_path_factory.mktemp("cluster")
            with running_cluster(directory, TWO_LAYERS, wrapper=[*namespace, *mount], is_warm=True) as cluster:
                yield cluster
            return
    pytest.skip("nobody may mount a small /dev/shm here")


@pytest.fixture(scope="module")
def undisturbed(cluster: Cluster) -> list[Collected]:
    return collect_all(cluster.gateway, MESSAGES)


def kill(*roles: str) -> Callable[[Cluster], None]:
    def kill_all(cluster: Cluster) -> None:
        cluster.kill(*roles)

    return kill_all


def replace_dense(cluster: Cluster) -> None:
    ended = ctl(cluster, "replace-dense")
    assert ended.returncode == 0, ended.stderr


@pytest.mark.parametrize(
    "disturb",
    [kill("dense_worker"), kill("attn_worker"), kill("dense_worker", "attn_worker"), replace_dense],
    ids=["dense worker killed", "attention worker killed", "both killed", "dense worker replaced"],
)
def test_a_recovery_needs_shared_memory_for_only_one_data_region(
    cluster: Cluster, undisturbed: list[Collected], disturb: Callable[[Cluster], None]
) -> None:
    pids = {role: cluster.pid_of(role) for role in ("attn_worker", "dense_worker")}
    num_restarts = cluster.log_file.read_text().count("event=restarting ")
    disturbed = collect_all(cluster.gateway, MESSAGES, lambda: disturb(cluster))
    for collected, expected in zip(disturbed, undisturbed, strict=True):
        collected.assert_equals(expected)
    num_killed = sum(cluster.pid_of(role) != pid for role, pid in pids.items()) if disturb is not replace_dense else 0
    assert cluster.log_file.read_text().count("event=restarting ") - num_restarts == num_killed
