"""The launcher itself: what it leaves behind, its error when a service ends too often, and how Ctrl+C ends it."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

from services.channel.region import SHM_DIR
from services.launch.run_directory import live_directories, remove_stale_directories, run_directory
from tests.support.cluster import (
    NO_STANDBYS,
    REPOSITORY,
    START_TIMEOUT_S,
    STOP_TIMEOUT_S,
    children_of,
    free_port,
    runs_role,
    wait_for_log,
)
from tests.support.warm_process import WarmProcess, run_warm, warm_server


@pytest.fixture
def own_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Launchers' directories of this test alone: other servers may run on this machine."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr("services.launch.run_directory.SHM_DIR", tmp_path)


def test_a_killed_launchers_directory_is_removed_at_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    code = (
        "import os, signal\nfrom services.launch.run_directory import run_directory\n"
        "with run_directory() as path:\n    print(path, flush=True)\n    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    command = [sys.executable, "-c", code]
    result = subprocess.run(
        command, cwd=REPOSITORY, env=os.environ | {"TMPDIR": str(tmp_path)}, capture_output=True, text=True
    )
    left = Path(result.stdout.strip())
    assert result.returncode == -signal.SIGKILL and left.parent == tmp_path and left.is_dir()
    with run_directory() as own:
        assert not left.exists() and own.is_dir()
        assert remove_stale_directories() == []
    assert not own.exists()


def test_a_killed_launchers_shared_memory_is_removed_at_the_next_start() -> None:
    code = (
        "import os, signal\nfrom services.launch.run_directory import SHM_DIR, run_directory\n"
        "with run_directory(SHM_DIR) as path:\n    (path / 'host-kv').write_bytes(bytes(9000))\n"
        "    print(path, flush=True)\n    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True)
    left = Path(result.stdout.strip())
    assert left.parent == SHM_DIR and left.is_dir() and left.stat().st_mode & 0o777 == 0o700
    with run_directory(SHM_DIR) as own:
        assert not left.exists() and own.is_dir()
        assert own not in live_directories(), "no launcher answers there"
    assert not own.exists()


@pytest.mark.usefixtures("own_directories")
def test_a_directory_whose_launcher_was_killed_before_it_was_locked_is_removed(tmp_path: Path) -> None:
    left = tmp_path / "twostroke-run-left"
    (left / "directory").mkdir(parents=True)
    others = [tmp_path / "twostroke-soak-1", tmp_path / "other"]  # of other programs
    for other in others:
        other.mkdir()
    target = tmp_path / "target"
    target.mkdir()
    (tmp_path / "twostroke-run-link").symlink_to(target)
    assert remove_stale_directories() == [left.name]
    assert not left.exists() and target.is_dir() and all(other.is_dir() for other in others)


@pytest.mark.usefixtures("own_directories")
def test_directories_of_other_users_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "twostroke-run-theirs").mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: os.getuid() + 1)
        assert remove_stale_directories() == []
    assert remove_stale_directories() == ["twostroke-run-theirs"]


@pytest.mark.usefixtures("own_directories")
@pytest.mark.parametrize("name", ["open", "flock"])
def test_a_launcher_whose_directory_is_removed_before_it_is_locked_makes_another_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    module = {"open": os, "flock": fcntl}[name]
    real = getattr(module, name)
    removed: list[str] = []

    def after_another_launcher(*arguments: Any) -> Any:
        monkeypatch.setattr(module, name, real)
        removed.extend(remove_stale_directories())
        return real(*arguments)

    monkeypatch.setattr(module, name, after_another_launcher)
    with run_directory() as own:
        assert own.is_dir() and live_directories() == [own]
        assert len(removed) == 1 and removed != [own.name]
        assert remove_stale_directories() == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("own_directories")
def test_two_launchers_may_remove_the_same_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stale = tmp_path / "twostroke-run-stale"
    stale.mkdir()
    (stale / "lock").touch()
    real_rmtree = shutil.rmtree

    def rmtree_late(path: Path, **options: bool) -> None:
        real_rmtree(path)  # the other launcher is faster
        real_rmtree(path, **options)

    monkeypatch.setattr(shutil, "rmtree", rmtree_late)
    remove_stale_directories()
    assert not stale.exists()


def test_after_the_limit_of_restarts_the_cluster_stops_with_the_services_own_error(tmp_path: Path) -> None:
    log_file = tmp_path / "log"
    sockets = [f"{name}=unix:{tmp_path}/{name}.sock" for name in ("gateway.address", "gateway.http_address")]
    command = [sys.executable, "-m", "services.launch"]
    overrides = ["launch.max_restarts=1", "launch.restart_delay_s=0.01"]
    for override in (*NO_STANDBYS, *sockets, *overrides, f"dense.address=unix:{tmp_path}/dense.sock"):
        command += ["--set", override]
    with log_file.open("w") as log:
        process = WarmProcess(warm_server(), command, stderr=log.fileno())
    try:
        wait_for_log(process, log_file, "Serving ")
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        deadline = time.monotonic() + START_TIMEOUT_S
        while process.poll() is None:
            with contextlib.suppress(OSError):  # a process has ended meanwhile
                for pid in children.read_text().split():
                    if "services.attn_worker" in Path(f"/proc/{pid}/cmdline").read_text():
                        os.kill(int(pid), signal.SIGKILL)
            assert time.monotonic() < deadline
            time.sleep(0.1)
        last = log_file.read_text().splitlines()[-1]
        assert process.returncode == 1
        assert "attn_worker" in last and "limit is 1 restarts" in last and "SIGKILL" in last
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("role", ["dense_worker", "attn_worker"])
def test_a_start_that_ends_because_a_worker_hangs_names_that_worker(tmp_path: Path, role: str) -> None:
    log_file = tmp_path / "log"
    sockets = [f"{name}=unix:{tmp_path}/{name}.sock" for name in ("gateway.address", "gateway.http_address")]
    command = [sys.executable, "-m", "services.launch"]
    for override in (*NO_STANDBYS, *sockets, "launch.start_timeout_s=4"):
        command += ["--set", override]
    with log_file.open("w") as log:
        process = WarmProcess(warm_server(), command, stderr=log.fileno())
    try:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not (stopped := [pid for pid in children_of(process.pid) if runs_role(pid, role)]):
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.01)
        os.kill(stopped[0], signal.SIGSTOP)
        assert process.wait(START_TIMEOUT_S) == 1
        last = log_file.read_text().splitlines()[-1]
        assert f"does not serve within 4 s: no answer from the {role}, process {stopped[0]}" in last
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("dense.device=cuda:99", r"device 'cuda:99' was asked for, torch \S+ sees \d+ CUDA devices"),
        ("attention.device=cuda:99", r"device 'cuda:99' was asked for, torch \S+ sees \d+ CUDA devices"),
        ("launch.mps=on", r"launch\.mps is 'on', but (this machine has no|the workers share no GPU)"),
    ],
)
def test_a_missing_device_is_reported_in_one_line(setting: str, message: str) -> None:
    result = run_warm("services.launch", "--prompt", "a", "--set", "dense.device=cpu", "--set", setting)
    assert result.returncode == 1 and result.stdout == ""
    assert re.search(message, result.stderr.splitlines()[-1]) and "Traceback" not in result.stderr


def test_a_model_without_a_class_of_transformers_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "internvl_chat"}))
    (tmp_path / "model.safetensors").touch()
    result = run_warm("services.launch", "--prompt", "a", "--set", f"model.path={tmp_path}")
    assert result.returncode == 1 and result.stdout == ""
    said = "has model_type 'internvl_chat', of which transformers has no class, and code that comes with a model"
    assert said in result.stderr.splitlines()[-1] and "Traceback" not in result.stderr


def test_a_start_that_fails_leaves_no_link_behind(tmp_path: Path) -> None:
    command = ["services.launch", "--gateway-processes", "2", "--port", str(free_port())]
    for name in ("gateway.address", "dense.address"):  # several gateways cannot share a Unix socket
        command += ["--set", f"{name}=unix:{tmp_path}/{name}.sock"]
    result = run_warm(*command)
    assert result.returncode == 1 and "several processes can share a TCP port" in result.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("arguments", [[], ["--prompt", "a"]], ids=["server", "prompt"])
def test_a_signal_during_the_imports_of_the_launcher(
    arguments: list[str], number: signal.Signals, tmp_path: Path
) -> None:
    """One of the imported modules takes so long that the signal certainly comes meanwhile."""
    slow = "import time\nprint('importing', flush=True)\nwhile True:\n    time.sleep(0.01)\n"
    (tmp_path / "structlog.py").write_text(slow)
    process = subprocess.Popen(
        [sys.executable, "-m", "services.launch", *arguments],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
    )
    try:
        assert process.stdout is not None and process.stdout.readline() == "importing\n"
        process.send_signal(number)
        _, stderr = process.communicate(timeout=30)
    finally:
        process.kill()
    assert (process.returncode, stderr) == (0, "")


def test_a_second_ctrl_c_leaves_nothing_behind(tmp_path: Path) -> None:
    log_file = tmp_path / "log"
    command = [sys.executable, "-m", "services.launch"]
    sockets = [f"{name}=unix:{tmp_path}/{name}.sock" for name in ("gateway.address", "gateway.http_address")]
    for override in (*NO_STANDBYS, *sockets, f"dense.address=unix:{tmp_path}/dense.sock", "launch.stop_grace_s=2"):
        command += ["--set", override]
    with log_file.open("w") as log:
        process = WarmProcess(warm_server(), command, stderr=log.fileno())
    children: dict[int, str] = {}
    try:
        wait_for_log(process, log_file, "Serving ")
        children = {pid: Path(f"/proc/{pid}/cmdline").read_text() for pid in children_of(process.pid)}
        [stuck] = [pid for pid, command_line in children.items() if "services.dense_worker" in command_line]
        os.kill(stuck, signal.SIGSTOP)  # only SIGKILL can end it
        process.send_signal(signal.SIGINT)
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        assert process.wait(STOP_TIMEOUT_S) == 0
        assert not [pid for pid in children if Path(f"/proc/{pid}").exists()]
        assert not os.path.lexists(tmp_path / "dense.address.sock")
    finally:
        process.kill()
        process.wait()
        for pid in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def test_a_closed_stdout_is_not_reported_as_a_bug(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "services.launch", "--prompt", "San Francisco is a", "--max-tokens", "64"]
    with (tmp_path / "log").open("w") as log:
        process = WarmProcess(warm_server(), command, stdout=writer, stderr=log.fileno())
    os.close(writer)
    process.wait(100)
    stderr = (tmp_path / "log").read_text()
    assert "event=serving" in stderr and "bug" not in stderr and "Traceback" not in stderr
