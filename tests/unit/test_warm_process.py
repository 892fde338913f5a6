"""A process forked by the warm server behaves in the same way as one started by `subprocess`."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.support.cluster import is_alive
from tests.support.warm_process import READY, REPOSITORY, WarmProcess, WarmServer, warm_server

MODULE = "tests.support.workers.startup_report"
WAIT_S = 30.0
OTHER_ENVIRONMENT = {name: value for name, value in os.environ.items() if name.startswith("PYTHON")} | {"COLOUR": "red"}


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", MODULE, *arguments]


def start(is_warm: bool, log_file: Path, *arguments: str, **options: Any) -> WarmProcess | subprocess.Popen[bytes]:
    with log_file.open("wb") as log:
        if is_warm:
            return WarmProcess(warm_server(), command(*arguments), stderr=log.fileno(), **options)
        return subprocess.Popen(command(*arguments), cwd=REPOSITORY, stdin=subprocess.DEVNULL, stderr=log, **options)


def report(log_file: Path) -> dict[str, Any]:
    """Waits for the process's report of how it was started."""
    deadline = time.monotonic() + WAIT_S
    while "\n" not in log_file.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return json.loads(log_file.read_text().splitlines()[0])


@pytest.mark.parametrize("start_new_session", [False, True])
@pytest.mark.parametrize("env", [dict(os.environ), OTHER_ENVIRONMENT], ids=["ours", "other"])
def test_a_forked_process_starts_like_a_subprocess(
    tmp_path: Path, env: Mapping[str, str], start_new_session: bool
) -> None:
    started = []
    for is_warm in (False, True):
        process = start(
            is_warm, tmp_path / "log", "returns", "a b", "--c=d\n", env=env, start_new_session=start_new_session
        )
        assert process.wait(WAIT_S) == 0
        started.append(report(tmp_path / "log"))
    assert started[0]["parent"] == os.getpid() and started[0]["leads_session"] == start_new_session
    assert started[1] == started[0]


WRAPPERS = {
    "cores": ["taskset", "--cpu-list", str(max(os.sched_getaffinity(0)))],
    "files": ["sh", "-c", 'ulimit -n 200 && exec "$@"', "sh"],
    "mounts": ["unshare", "--mount"],
    "users and mounts": ["unshare", "--map-root-user", "--mount"],
}


@pytest.mark.parametrize("wrapper", WRAPPERS.values(), ids=WRAPPERS)
def test_a_wrapper_changes_for_a_forked_process_what_it_changes_for_a_subprocess(
    tmp_path: Path, wrapper: list[str]
) -> None:
    if subprocess.run([*wrapper, "true"], capture_output=True).returncode:
        pytest.skip("nobody may do this here")
    reports = []
    for is_warm in (False, True):
        with (tmp_path / "log").open("wb") as log:
            if is_warm:
                process = WarmProcess(warm_server(), command("returns"), stderr=log.fileno(), wrapper=wrapper)
            else:
                process = subprocess.Popen([*wrapper, *command("returns")], cwd=REPOSITORY, stderr=log)
        assert process.wait(WAIT_S) == 0
        started = report(tmp_path / "log")
        new = [kind for kind, name in started["namespaces"].items() if name != os.readlink(f"/proc/self/ns/{kind}")]
        reports.append((new, *(started[name] for name in ("cores", "max_files", "cwd", "parent"))))
    assert reports[1] == reports[0]


@pytest.mark.parametrize("end", ["returns", "exits", "exits with words", "raises"])
def test_a_forked_process_ends_like_a_subprocess(tmp_path: Path, end: str) -> None:
    outcomes = []
    for is_warm in (False, True):
        status = start(is_warm, tmp_path / "log", end).wait(WAIT_S)
        outcomes.append((status, (tmp_path / "log").read_text().splitlines()[1:][-1:]))
    assert outcomes[1] == outcomes[0]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_signals_end_a_forked_process_like_a_subprocess(tmp_path: Path, number: int) -> None:
    statuses = []
    for is_warm in (False, True):
        process = start(is_warm, tmp_path / "log", "waits")
        report(tmp_path / "log")
        assert process.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.05)
        process.send_signal(number)
        statuses.append(process.wait(WAIT_S))
        process.send_signal(number)  # does nothing, since the process has ended
    assert statuses == [-number, -number]


def test_all_waiting_threads_see_its_end(tmp_path: Path) -> None:
    process = start(True, tmp_path / "log", "waits")
    with ThreadPoolExecutor(3) as threads:
        ends = [threads.submit(process.wait, timeout) for timeout in (None, None, WAIT_S)]
        process.kill()
        assert [end.result(WAIT_S) for end in ends] == [-signal.SIGKILL] * 3
    assert not Path(f"/proc/{process.pid}").exists()


def test_a_server_that_is_late_fails_one_start_and_its_process_is_killed() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    server, options = WarmServer(ours, timeout_s=0.05), {"stdout": 1, "stderr": 2, "env": {}, "pass_fds": ()}

    def begin() -> int:
        return server.start(["-m", MODULE], start_new_session=False, wrapper=(), **options)

    with theirs, ours, subprocess.Popen(["sleep", "100"]) as late:
        for answers in ([], [READY], [b"1 %d" % late.pid, b"2 12345"]):  # imports, then forks, then is quick
            for answer in answers:
                theirs.send(answer)
            if answers[1:]:
                assert begin() == 12345
            else:
                with pytest.raises(TimeoutError):
                    begin()
        assert late.wait(WAIT_S) == -signal.SIGKILL


def test_a_process_that_has_ended_is_not_alive_though_nobody_has_waited_for_it() -> None:
    """Helpers of a killed gateway may become children of a launcher that was forked, which does not know of them."""
    process = subprocess.Popen(["sleep", "100"])
    assert is_alive(process.pid)
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert not is_alive(process.pid)
    process.wait()
    assert not is_alive(process.pid)
