"""Runs a cluster on GPUs, and asks its MPS daemon through NVIDIA's own program."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from services.launch.mps import CONTROL, has_mps
from tests.support.cluster import Cluster, running_cluster

DEVICE = "cuda"
PIPE_VARIABLE = "CUDA_MPS_PIPE_DIRECTORY"
ANSWER_TIMEOUT_S = 30.0
END_TIMEOUT_S = 60.0
WORKERS = ("dense_worker", "attn_worker")


@contextlib.contextmanager
def gpu_cluster(directory: Path, *overrides: str) -> Iterator[Cluster]:
    """A cluster on the first GPU, unless `overrides` say otherwise. Its MPS daemon must leave no process behind."""
    settings = (
        f"dense.device={DEVICE}",
        f"attention.device={DEVICE}",
        # The default would first build TensorRT engines, and then choose the faster backend by measurement.
        "dense.backend=torch",
        # The default is nine tenths of the free memory, and other tests may need some of it at the same time.
        "attention.num_blocks=2000",
    )
    with running_cluster(directory, *settings, *overrides) as cluster:
        pipe = pipe_of(cluster.pid_of("dense_worker"))
        yield cluster
    deadline = time.monotonic() + END_TIMEOUT_S
    while pipe is not None and (left := processes_with(pipe)):
        assert time.monotonic() < deadline, f"MPS processes outlive the launcher: {left}"
        time.sleep(0.1)


def assert_mps_clients(cluster: Cluster) -> None:
    """Checks that one MPS daemon lists both workers as its clients. Without MPS there is nothing to check."""
    if not has_mps():
        return
    pipes = {pipe_of(cluster.pid_of(role)) for role in WORKERS}
    assert len(pipes) == 1 and None not in pipes, f"the workers are clients of the daemons {pipes}"


def pipe_of(pid: int) -> str | None:
    """The directory of the MPS daemon that lists this process as a client; None if none does.

    What a process that was started early has been told of its environment, /proc does not show.
    """
    return next((pipe for pipe in pipes_of_daemons() if pid in clients_of(pipe)), None)


def pipes_of_daemons() -> set[str]:
    """The directories of all MPS daemons of this machine."""
    found = set()
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # a process of another user, or one that has just ended
            if Path((path / "cmdline").read_bytes().split(b"\0")[0].decode()).name == CONTROL:
                entries = (path / "environ").read_bytes().decode().split("\0")
                found.add(dict(entry.split("=", 1) for entry in entries if "=" in entry).get(PIPE_VARIABLE))
    return {pipe for pipe in found if pipe is not None}


def clients_of(pipe: str) -> set[int]:
    """The clients of this daemon; none if it has just ended, as that of another test may."""
    try:
        servers = ask_mps(pipe, "get_server_list").split()
        return {int(pid) for server in servers for pid in ask_mps(pipe, f"get_client_list {server}").split()}
    except subprocess.CalledProcessError:
        return set()


def ask_mps(pipe: str, command: str) -> str:
    environment = os.environ | {PIPE_VARIABLE: pipe}
    return subprocess.run(
        [CONTROL],
        input=f"{command}\n",
        env=environment,
        capture_output=True,
        text=True,
        timeout=ANSWER_TIMEOUT_S,
        check=True,
    ).stdout


def processes_with(pipe: str) -> list[str]:
    """Command lines of all processes with this pipe directory: the daemon, its servers, and their clients."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # a process of another user, or one that has just ended
            if f"{PIPE_VARIABLE}={pipe}\0".encode() in (path / "environ").read_bytes():
                found.append(f"{path.name}: {(path / 'cmdline').read_text()}")
    return found
