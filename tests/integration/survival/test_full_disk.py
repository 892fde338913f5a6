"""Workers die while the disk of temporary files is full: streams go on, and standbys come back when it has room."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.clients.streams import collect_all
from tests.support.cluster import Cluster, request, running_cluster
from tests.support.models import TWO_LAYERS

pytestmark = pytest.mark.timeout(400)  # processes start and stop several times, and the machine may be slow

DISK_BYTES = 2**20
WAIT_S = 60.0
NAMESPACES = (["unshare", "--mount"], ["unshare", "--map-root-user", "--mount"])
MESSAGES = [request("Count", 120, temperature=0.9, seed=seed, ignore_eos=True) for seed in range(4)]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    """A launcher whose directory is on a small disk of its own."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["sh", "-c", f'mount -t tmpfs -o size={DISK_BYTES} tmpfs {disk} && exec "$@"', "sh"]
    settings = (TWO_LAYERS, "launch.standby_dense=auto", "launch.standby_attention=auto", "launch.max_restarts=20")
    for namespace in NAMESPACES:
        if subprocess.run([*namespace, *mount, "true"], capture_output=True).returncode == 0:
            wrapper, env = [*namespace, *mount], {**os.environ, "TMPDIR": str(disk)}
            with running_cluster(tmp_path, *settings, wrapper=wrapper, env=env, is_warm=True) as cluster:
                yield cluster
            return
    pytest.skip("nobody may mount a disk here")


def wait_for(cluster: Cluster, event: str, count: int) -> None:
    """Waits until the log has so many lines with an event."""
    deadline = time.monotonic() + WAIT_S
    while cluster.log_file.read_text().count(event) < count:
        assert time.monotonic() < deadline, cluster.log_file.read_text()
        time.sleep(0.05)


def test_streams_go_on(cluster: Cluster) -> None:
    undisturbed = collect_all(cluster.gateway, MESSAGES)
    wait_for(cluster, "standby ready", 2)
    filling = Path(f"/proc/{cluster.process.pid}/root{cluster.log_file.with_name('disk')}/filling")
    with pytest.raises(OSError, match="No space left"), filling.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    for role in ("attn_worker", "dense_worker"):
        pid = cluster.pid_of(role)  # the one that serves is older than its standby
        disturbed = collect_all(cluster.gateway, MESSAGES, lambda pid=pid: os.kill(pid, signal.SIGKILL))
        for collected, expected in zip(disturbed, undisturbed, strict=True):
            collected.assert_equals(expected)
    wait_for(cluster, "the standby takes over", 2)
    wait_for(cluster, "No space left on device", 2)  # for a further standby of each
    filling.unlink()
    wait_for(cluster, "standby ready", 4)
    cluster.wait_idle()
