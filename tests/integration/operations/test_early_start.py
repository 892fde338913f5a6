"""A cluster whose services were started before the launcher had read its command line."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

import pytest

from services.common.early_start import EARLY_FLAG
from services.launch.early_services import MODULES
from tests.support.cluster import START_TIMEOUT_S, children_of, running_cluster
from tests.support.warm_process import EARLY, WarmProcess, warm_server

PROMPT = list(range(20, 40))


def command_lines(pid: int) -> dict[int, str]:
    return {child: Path(f"/proc/{child}/cmdline").read_text() for child in children_of(pid)}


def test_services_that_were_started_early_serve_and_are_started_again_like_others(tmp_path: Path) -> None:
    env = os.environ | {EARLY: "1"}
    with running_cluster(tmp_path, "launch.restart_delay_s=0.01", is_warm=True, env=env) as cluster:
        early = {pid: line for pid, line in command_lines(cluster.process.pid).items() if EARLY_FLAG in line}
        assert sorted(line.split("\0")[2] for line in early.values()) == sorted(MODULES)
        expected = cluster.generate(PROMPT, 8).token_ids
        cluster.kill("attn_worker", "dense_worker")
        assert cluster.generate(PROMPT, 8).token_ids == expected
        assert len({*early} & {*children_of(cluster.process.pid)}) == 1, "the gateway has not been killed"


@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        (["--set", "dense.device=nothing"], 1),
        (["--set", "model.path=/nowhere"], 1),
        (["--unknown"], 2),
        (["--prompt", "San Francisco is a", "--max-tokens", "4"], 0),
    ],
)
def test_a_launcher_leaves_none_of_them_behind(tmp_path: Path, arguments: list[str], status: int) -> None:
    command, log_file = [sys.executable, "-m", "services.launch", *arguments], tmp_path / "log"
    with log_file.open("w") as log:
        options = {"stdout": log.fileno(), "stderr": log.fileno(), "env": os.environ | {EARLY: "1"}}
        launcher = WarmProcess(warm_server(), command, **options)
    assert launcher.wait(START_TIMEOUT_S) == status, log_file.read_text()
    assert "Traceback" not in log_file.read_text()
    assert not started_early_by(launcher.pid)


def started_early_by(launcher_pid: int) -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError, UnicodeError):  # it has just ended
            line = path.read_text().split("\0")
            if EARLY_FLAG in line and str(launcher_pid) in line:
                found.append(" ".join(line))
    return found
