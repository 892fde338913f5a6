"""Starts on a GPU that cannot succeed: the launcher ends by itself, with one line that names the reason."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from services.launch.mps import CONTROL
from tests.gpu.gpu_cluster import DEVICE
from tests.support.cluster import REPOSITORY

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

END_TIMEOUT_S = 90.0  # all start at the same time


@dataclass(frozen=True)
class BadStart:
    """Settings, and a regular expression for the last line of the log."""

    dense: str
    attention: str
    settings: tuple[str, ...]
    message: str
    has_hanging_mps: bool = False


CASES = {
    "no-room-for-a-block": BadStart(
        DEVICE,
        DEVICE,
        ("attention.kv_cache_memory_fraction=1e-9", "launch.mps=off"),
        r"room for no block: attention\.kv_cache_memory_fraction 1e-09 of free memory is \d+ bytes, one block of 16 "
        r"tokens takes \d+",
    ),
    "no-room-for-the-blocks": BadStart(
        DEVICE,
        DEVICE,
        ("attention.num_blocks=1000000000", "launch.mps=off"),
        r"1000000000 blocks need \d+ bytes, attention\.kv_cache_memory_fraction 0\.9 of free memory is \d+",
    ),
    "no-such-gpu": BadStart(
        "cuda:99", DEVICE, (), r"device 'cuda:99' was asked for, torch \S+ sees \d+ CUDA devices"
    ),
    "dense-on-a-cpu": BadStart(
        "cpu",
        DEVICE,
        ("model.dtype=float32",),
        r"the attention worker offers a cuda_ipc_\w+ channel, the dense worker on cpu needs shm",
    ),
    "attention-on-a-cpu": BadStart(
        DEVICE,
        "cpu",
        ("model.dtype=float32",),
        "the attention worker offers a shm channel, the dense worker on cuda:0 needs cuda_ipc",
    ),
    "mps-hangs": BadStart(
        DEVICE,
        DEVICE,
        ("launch.mps=on",),
        f"the MPS daemon does not answer: {CONTROL} -d takes over 10.0 s",
        has_hanging_mps=True,
    ),
    "mps-where-nothing-is-shared": BadStart(
        DEVICE, "cuda:99", ("launch.mps=on",), r"launch\.mps is 'on', but the workers share no GPU"
    ),
}


@dataclass(frozen=True)
class Launcher:
    process: subprocess.Popen[str]
    log_file: Path


@pytest.fixture(scope="module")
def launchers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Launcher]]:
    """Starts all launchers at once, because each spends its time on imports. For one of them MPS hangs."""
    directory = tmp_path_factory.mktemp("program")
    program = directory / CONTROL
    program.write_text("#!/bin/sh\nexec sleep 600\n")
    program.chmod(0o700)
    launchers = {}
    for name, case in CASES.items():
        command = [sys.executable, "-m", "services.launch", "--prompt", "a"]
        for setting in (f"dense.device={case.dense}", f"attention.device={case.attention}", *case.settings):
            command += ["--set", setting]
        path = f"{directory}:{os.environ['PATH']}" if case.has_hanging_mps else os.environ["PATH"]
        log_file = directory / f"{name}.log"
        with log_file.open("w") as log:
            process = subprocess.Popen(
                command, cwd=REPOSITORY, stderr=log, env=os.environ | {"PATH": path}, text=True
            )
        launchers[name] = Launcher(process, log_file)
    yield launchers
    for launcher in launchers.values():
        launcher.process.terminate()
        launcher.process.wait(END_TIMEOUT_S)


@pytest.mark.parametrize("name", CASES)
def test_the_launcher_ends_with_one_line(launchers: dict[str, Launcher], name: str) -> None:
    case, launcher = CASES[name], launchers[name]
    status, log = launcher.process.wait(END_TIMEOUT_S), launcher.log_file.read_text()
    assert status == 1, log
    assert re.search(case.message, log.splitlines()[-1]), log
    assert "Traceback" not in log
