"""The processes of several ranks, by name."""

from __future__ import annotations

import time
from pathlib import Path

from tests.support.cluster import START_TIMEOUT_S, Cluster, children_of

PROCESSES = ("dense_worker", "dense_worker-1", "attn_worker", "attn_worker-1")  # of two ranks


def pid_of(cluster: Cluster, name: str) -> int:
    """The process id of a service, whose name is that of its files. If it was just killed, waits for the next one."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        for pid in children_of(cluster.process.pid):
            try:
                if f"/{name}.toml\0" in Path(f"/proc/{pid}/cmdline").read_text():
                    return pid
            except OSError:
                continue  # it has just ended
        time.sleep(0.02)
    raise AssertionError(f"no {name} among the children of the launcher")
