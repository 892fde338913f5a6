"""Workers die and are replaced although /dev/shm has room for only one data region, as in some containers.

So it is without standbys and with them, and a host tier that takes the rest of it.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence

import pytest

from services.common.config import Config, ModelSection
from services.common.resolve import resolve_model
from services.pb import launch_pb2
from tests.chaos.monkey import launcher_stub
from tests.support.clients.streams import Collected, collect_all
from tests.support.cluster import Cluster, ctl, request, running_cluster
from tests.support.models import TWO_LAYERS

pytestmark = pytest.mark.timeout(400)  # processes start and stop several times, and the machine may be slow

MODEL = resolve_model(ModelSection(), "cpu")
ROW_BYTES = (MODEL.config.qkv_size + MODEL.config.attn_size) * MODEL.dtype.itemsize
REGION_BYTES = Config().scheduler.max_num_batched_tokens * ROW_BYTES
SHM_BYTES = 3 * REGION_BYTES // 2
HOST_KV_BYTES = 16 * 2**20
STANDBYS = ("launch.standby_dense=loaded", "launch.standby_attention=imports")
READY_TIMEOUT_S = 60.0
NAMESPACES = (["unshare", "--mount"], ["unshare", "--map-root-user", "--mount"])
MESSAGES = [request("Count", 120, temperature=0.9, seed=seed, ignore_eos=True) for seed in range(4)]


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "with standbys and a host tier"])
def has_standbys(request: pytest.FixtureRequest) -> bool:
    return request.param


@pytest.fixture(scope="module")
def cluster(has_standbys: bool, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    num_bytes, settings = SHM_BYTES, [TWO_LAYERS]
    if has_standbys:
        num_bytes += HOST_KV_BYTES
        settings += [*STANDBYS, f"attention.host_kv_bytes={HOST_KV_BYTES}"]
    mount = ["sh", "-c", f'mount -t tmpfs -o size={num_bytes} tmpfs /dev/shm && exec "$@"', "sh"]
    for namespace in NAMESPACES:
        if subprocess.run([*namespace, *mount, "true"], capture_output=True).returncode == 0:
            directory = tmp_path_factory.mktemp("cluster")
            with running_cluster(directory, *settings, wrapper=[*namespace, *mount], is_warm=True) as cluster:
                yield cluster
            return
    pytest.skip("nobody may mount a small /dev/shm here")


@pytest.fixture(scope="module")
def undisturbed(cluster: Cluster) -> list[Collected]:
    return collect_all(cluster.gateway, MESSAGES)


def wait_ready(cluster: Cluster) -> None:
    """Waits until both standbys are ready."""
    deadline = time.monotonic() + READY_TIMEOUT_S
    while any(each.state != launch_pb2.StandbyStatus.READY for each in launcher_status(cluster).standbys):
        assert time.monotonic() < deadline, launcher_status(cluster)
        time.sleep(0.05)


def launcher_status(cluster: Cluster) -> launch_pb2.LauncherStatus:
    return launcher_stub(cluster).GetStatus(launch_pb2.GetStatusRequest(), timeout=READY_TIMEOUT_S)


def pids_of(cluster: Cluster) -> dict[str, int]:
    """The workers that serve."""
    services = launcher_status(cluster).services
    return {each.role: each.pid for each in services if each.role in ("attn_worker", "dense_worker")}


def num_replaced(cluster: Cluster) -> int:
    """How often a worker that has died was started again, or a standby took over from it."""
    return len(re.findall('event=(restarting|"the standby takes over") ', cluster.log_file.read_text()))


def disturb(cluster: Cluster, killed: Sequence[str]) -> None:
    """Kills workers; if none are named, replaces the dense worker."""
    if killed:
        pids = pids_of(cluster)
        for role in killed:
            os.kill(pids[role], signal.SIGKILL)
    else:
        ended = ctl(cluster, "replace-dense")
        assert ended.returncode == 0, ended.stderr


@pytest.mark.parametrize(
    "killed",
    [("dense_worker",), ("attn_worker",), ("dense_worker", "attn_worker"), ()],
    ids=["dense worker killed", "attention worker killed", "both killed", "dense worker replaced"],
)
def test_a_recovery_needs_shared_memory_for_only_one_data_region(
    cluster: Cluster, undisturbed: list[Collected], killed: Sequence[str], has_standbys: bool
) -> None:
    if has_standbys:
        wait_ready(cluster)
    pids, num_before = pids_of(cluster), num_replaced(cluster)
    disturbed = collect_all(cluster.gateway, MESSAGES, lambda: disturb(cluster, killed))
    for collected, expected in zip(disturbed, undisturbed, strict=True):
        collected.assert_equals(expected)
    deadline = time.monotonic() + READY_TIMEOUT_S  # the streams may have ended before the launcher saw the kill
    while any(pids_of(cluster)[role] == pids[role] for role in killed):
        assert time.monotonic() < deadline, (pids, pids_of(cluster))
        time.sleep(0.05)
    assert num_replaced(cluster) - num_before == len(killed)
