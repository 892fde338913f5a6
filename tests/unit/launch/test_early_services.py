"""Processes of services that the launcher starts before it imports its own modules."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from services.launch import early_services
from services.launch.early_services import MODULES, EarlyService, EarlyServices, starting_early
from tests.support.cluster import is_alive

MODULE = "tests.support.workers.early_report"
TIMEOUT_S = 60.0
LAUNCHER = f"""
import os, sys
from services.launch.early_services import EarlyService
print(EarlyService({MODULE!r}).process.pid, flush=True)
sys.stdin.read()
os._exit(0)
"""


def test_a_process_gets_the_command_line_and_the_environment_of_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("TWOSTROKE_TEST_GONE", "TWOSTROKE_TEST_CHANGED", "TWOSTROKE_TEST_KEPT"):
        monkeypatch.setenv(name, "before")
    service, report = EarlyService(MODULE), tmp_path / "report"
    monkeypatch.delenv("TWOSTROKE_TEST_GONE")
    changes = {"TWOSTROKE_TEST_CHANGED": "after", "TWOSTROKE_TEST_NEW": "ü\n"}
    service.begin([str(report), "--child", str(service.lifeline)], os.environ | changes)
    assert service.process.wait(TIMEOUT_S) == 0
    found = json.loads(report.read_text())
    assert found["argv"] == [str(report), "--child", str(service.lifeline)]
    assert found["environment"] == changes | {"TWOSTROKE_TEST_KEPT": "before"}
    assert json.loads(service.line.recv(100)) == {"keep": ["a"], "prefix": ""}, "the socket is its lifeline"
    service.line.close()


@pytest.mark.parametrize("ends", ["launcher killed", "launcher ended", "not needed"])
def test_a_process_that_nobody_needs_ends(ends: str) -> None:
    if ends == "not needed":
        services = EarlyServices([MODULE, "services.other"])
        other, kept = services._services["services.other"], services._services[MODULE]
        services.keep({MODULE})
        assert other.process.returncode is not None and kept.process.poll() is None
        assert services.take("services.other") is None
        assert services.take(MODULE) is kept and services.take(MODULE) is None
        services.keep(set())
        assert kept.process.poll() is None, "it belongs to who has taken it"
        kept.end()
        return
    command = [sys.executable, "-c", LAUNCHER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as launcher:
        pid = int(launcher.stdout.readline())
        if ends == "launcher killed":
            launcher.kill()
    deadline = time.monotonic() + TIMEOUT_S
    while is_alive(pid):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_what_has_died_meanwhile_is_told_nothing() -> None:
    service = EarlyService("services.nothing")
    service.process.wait(TIMEOUT_S)
    service.begin(["--config", "file"], None)
    service.end()


@pytest.mark.parametrize(
    ("argv", "starts"),
    [
        ([], True),
        (["--config", "all.toml", "--set", "dense.device=cpu"], True),
        (["model", "--config=all.toml"], True),
        (["--config", "missing.toml"], False),
        (["--config", "broken.toml"], False),
        (["--config", "pipe"], False),
        (["--config", "gateway.toml"], False),
        (["--config=gateway.toml"], False),
        (["--config", "gateway.conf"], False),
        (["--conf=gateway.conf"], False),
        (["--config", "all.toml", "--config", "gateway.conf"], False),
        (["gateway.conf"], True),
        (["--config", "x" * 300], False),
        (["--set", 'launch.services=["gateway"]'], False),
        (["model", "--help"], False),
        (["-h"], False),
    ],
)
def test_services_are_started_early_for_a_launcher_of_all_services(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, argv: list[str], starts: bool
) -> None:
    (tmp_path / "all.toml").write_text("[scheduler]\nmax_num_seqs = 2\n")
    (tmp_path / "gateway.toml").write_text('[launch]\nservices = ["gateway"]\n')
    (tmp_path / "gateway.conf").write_text('[launch]\n"services" = ["gateway"]\n')
    (tmp_path / "broken.toml").write_text("[launch\n")
    os.mkfifo(tmp_path / "pipe")
    monkeypatch.chdir(tmp_path)
    started = list[str]()

    class Fake:
        def __init__(self, module: str) -> None:
            started.append(module)

        def end(self) -> None:
            started.append(f"end of {self}")

    monkeypatch.setattr(early_services, "EarlyService", Fake)
    with starting_early(argv):
        assert started == ([*MODULES] if starts else [])
    assert len(started) == (2 * len(MODULES) if starts else 0)
