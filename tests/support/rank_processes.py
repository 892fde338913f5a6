"""The processes of several ranks, and of their standbys, by name."""

from __future__ import annotations

import time
from collections.abc import Collection
from pathlib import Path

from services.common.early_start import EARLY_FLAG
from services.pb import dense_pb2, launch_pb2
from tests.chaos.monkey import launcher_stub
from tests.support.cluster import START_TIMEOUT_S, Cluster, children_of

PROCESSES = ("dense_worker", "dense_worker-1", "attn_worker", "attn_worker-1")  # of two ranks
STANDBYS = ("launch.standby_dense=loaded", "launch.standby_attention=imports", "launch.max_restarts=100")


def pid_of(cluster: Cluster, name: str) -> int:
    """The process id of a service, whose name is that of its files. If it was just killed, waits for the next one."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        for pid in children_of(cluster.process.pid):
            try:
                command_line = Path(f"/proc/{pid}/cmdline").read_text()
                if f"/{name}.toml\0" in command_line or f"services.{name}\0{EARLY_FLAG}\0" in command_line:
                    return pid
            except OSError:
                continue  # it has just ended
        time.sleep(0.02)
    raise AssertionError(f"no {name} among the children of the launcher")


def ready_pids(cluster: Cluster, killed: Collection[int] = ()) -> dict[str, int]:
    """The process ids of all workers, and of their standbys, once the workers serve and the standbys are ready, and the
    launcher has seen the deaths of those that were killed.
    """
    launcher, deadline = launcher_stub(cluster), time.monotonic() + START_TIMEOUT_S
    while True:
        status = launcher.GetStatus(launch_pb2.GetStatusRequest(), timeout=START_TIMEOUT_S)
        is_ready = all(each.state == launch_pb2.StandbyStatus.READY for each in status.standbys)
        if is_ready and cluster.dense_status().state == dense_pb2.DenseStatus.SERVING:
            found = {each.name: each.pid for each in status.services if each.name in PROCESSES}
            found |= {f"standby of {each.name}": each.pid for each in status.standbys}
            if not {*found.values()} & {*killed}:
                return found
        assert time.monotonic() < deadline, f"not ready within {START_TIMEOUT_S} s: {status}"
        time.sleep(0.02)
