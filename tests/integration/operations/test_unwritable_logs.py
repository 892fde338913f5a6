"""If the log cannot be written, only its lines are lost: requests are answered, and killed workers are replaced."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.clients.http_clients import client
from tests.support.cluster import NO_STANDBYS, START_TIMEOUT_S, STOP_TIMEOUT_S, children_of
from tests.support.warm_process import WarmProcess, warm_server

pytestmark = pytest.mark.timeout(400)  # processes start several times, and the machine may be slow

ROLES = ("attn_worker", "dense_worker", "gateway")


@contextlib.contextmanager
def full_disk() -> Iterator[int]:
    """A descriptor of a file to which nothing can be written."""
    with Path("/dev/full").open("w") as file:
        yield file.fileno()


@contextlib.contextmanager
def closed_pipe() -> Iterator[int]:
    """A descriptor of a pipe that nobody reads."""
    reader, writer = os.pipe()
    os.close(reader)
    yield writer
    os.close(writer)


@contextlib.contextmanager
def launcher(directory: Path, stderr: int) -> Iterator[WarmProcess]:
    """A launcher that serves at sockets in `directory`. At the end it must stop without an error.

    It answers a prompt when it has noticed that all services serve. From then on it starts killed ones again.
    """
    command = [sys.executable, "-m", "services.launch", "--sample-prompt", "San Francisco is a", "--max-tokens", "4"]
    sockets = (f"gateway.address=unix:{directory}/gateway.sock", f"gateway.http_address=unix:{directory}/http.sock")
    for override in (*NO_STANDBYS, *sockets):
        command += ["--set", override]
    answer = directory / "answer"
    with answer.open("w") as stdout:
        process = WarmProcess(warm_server(), command, stdout=stdout.fileno(), stderr=stderr)
    try:
        wait_until(lambda: has_answered(answer, process))
        yield process
        process.send_signal(signal.SIGINT)
        assert process.wait(STOP_TIMEOUT_S) == 0
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait(STOP_TIMEOUT_S)


def has_answered(answer: Path, process: WarmProcess) -> bool:
    assert process.poll() is None, f"the launcher ended with {process.returncode}"
    return answer.read_text().endswith("\n")


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def pids_of(process: WarmProcess, role: str) -> list[int]:
    pids = []
    for pid in children_of(process.pid):
        with contextlib.suppress(OSError):  # it has ended
            if f"services.{role}" in Path(f"/proc/{pid}/cmdline").read_text():
                pids.append(pid)
    return pids


@pytest.mark.parametrize("log", [full_disk, closed_pipe])
def test_requests_are_answered_and_a_killed_worker_comes_back(
    log: Callable[[], contextlib.AbstractContextManager[int]], tmp_path: Path
) -> None:
    with log() as stderr, launcher(tmp_path, stderr) as process, client(f"unix:{tmp_path}/http.sock") as http:

        def answer() -> tuple[int, str]:
            body = {"prompt": "San Francisco is a", "max_tokens": 16, "temperature": 0}
            response = http.post("/v1/completions", json=body)
            return response.status_code, response.json()["choices"][0]["text"]

        undisturbed = answer()
        assert undisturbed[0] == 200
        before = {role: pids_of(process, role) for role in ROLES}
        [attention] = before["attn_worker"]
        os.kill(attention, signal.SIGKILL)
        wait_until(lambda: pids_of(process, "attn_worker") not in ([], before["attn_worker"]))
        assert answer() == undisturbed
        for role in ("dense_worker", "gateway"):
            assert pids_of(process, role) == before[role]
