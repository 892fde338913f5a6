"""`ctl` without a launcher, and how it finds a running launcher."""

from __future__ import annotations

import re
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from services.common.errors import PeerError
from services.launch import ctl
from services.launch.run_directory import run_directory
from services.pb import launch_pb2_grpc
from services.rpc.error_details import rich_status


@pytest.fixture(autouse=True)
def nobody_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def test_without_a_launcher_ctl_prints_an_error(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "twostroke-run-dead").mkdir()
    (tmp_path / "twostroke-run-dead" / "lock").touch()
    assert ctl.main(["status"]) == ctl.NO_LAUNCHER
    assert ctl.main(["replace-dense"]) == ctl.NO_LAUNCHER
    assert "no launcher runs here" in capsys.readouterr().err


def test_the_error_names_a_launcher_that_does_not_answer(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert ctl.main(["--launcher", f"unix:{tmp_path}/gone.sock", "status"]) == ctl.NO_LAUNCHER
    assert f"{tmp_path}/gone.sock does not answer" in capsys.readouterr().err


def test_the_error_names_a_dense_worker_that_does_not_answer(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = ["drain-attention", "unix:/run/attention-a.sock", "--dense", f"unix:{tmp_path}/gone.sock"]
    assert ctl.main(words) == ctl.NO_LAUNCHER
    assert f"the dense worker at unix:{tmp_path}/gone.sock does not answer" in capsys.readouterr().err


def test_a_single_launcher_is_found_and_with_two_one_must_be_given(capsys: pytest.CaptureFixture[str]) -> None:
    with run_directory() as first:
        assert ctl.find_launcher() == f"unix:{first}/launch.sock"
        with run_directory() as second:
            assert ctl.main(["status"]) == ctl.NO_LAUNCHER
            message = capsys.readouterr().err
            assert str(first) in message and str(second) in message and "--launcher" in message


@pytest.mark.parametrize(
    ("command", "limit"), [("status", "within 0.5 s"), ("replace-dense", r"within 0.25 s, the limit \(--timeout\)")]
)
def test_a_launcher_that_hangs_is_reported_with_the_limit(
    command: str, limit: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_over = threading.Event()

    class Hanging(launch_pb2_grpc.LauncherServicer):
        def GetStatus(self, request: object, context: object) -> None:
            is_over.wait()

        ReplaceDense = GetStatus

    monkeypatch.setattr(ctl, "STATUS_TIMEOUT_S", 0.5)
    address = f"unix:{tmp_path}/launch.sock"
    server = grpc.server(ThreadPoolExecutor(1))
    launch_pb2_grpc.add_LauncherServicer_to_server(Hanging(), server)
    server.add_insecure_port(address)
    server.start()
    try:
        options = ["--timeout", "0.25"] if command == "replace-dense" else []
        assert ctl.main(["--launcher", address, command, *options]) == ctl.FAILED
        assert re.search(limit, capsys.readouterr().err)
    finally:
        is_over.set()
        server.stop(None).wait()


def test_a_refusal_of_the_launcher_is_no_missing_answer(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    class Refusing(launch_pb2_grpc.LauncherServicer):
        def DrainAttention(self, request: object, context: grpc.ServicerContext) -> None:
            context.abort_with_status(rich_status(PeerError("attn_worker-3 was not drained: others have no room")))

    address = f"unix:{tmp_path}/launch.sock"
    server = grpc.server(ThreadPoolExecutor(1))
    launch_pb2_grpc.add_LauncherServicer_to_server(Refusing(), server)
    server.add_insecure_port(address)
    server.start()
    try:
        assert ctl.main(["--launcher", address, "drain-attention", "attn_worker-3"]) == ctl.FAILED
        assert capsys.readouterr().err.endswith(": attn_worker-3 was not drained: others have no room\n")
    finally:
        server.stop(None).wait()


def test_relative_paths_start_at_the_current_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert ctl._absolute("model.path=models/x") == f"model.path={tmp_path}/models/x"
    assert ctl._absolute("model.path='/a/b'") == "model.path=/a/b"
    assert ctl._absolute("dense.backend=torch") == "dense.backend=torch"
