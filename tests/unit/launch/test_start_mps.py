"""When the launcher starts MPS, and what it logs if it does not."""

from __future__ import annotations

from pathlib import Path

import pytest
import structlog

from services.common.config import Config, load_config
from services.common.errors import PeerError
from services.launch import mps


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Directories of the daemons that were started, on a machine with a GPU and MPS."""
    directories: list[Path] = []

    class Daemon:
        def __init__(self, directory: Path) -> None:
            self.directory = directory

        def start(self) -> None:
            directories.append(self.directory)

        def stop(self) -> None:
            raise PeerError("no answer")

    monkeypatch.setattr(mps, "MpsDaemon", Daemon)
    for name in ("has_mps", "has_gpu"):
        monkeypatch.setattr(mps, name, lambda: True)
    return directories


def config(dense: str, attention: str, mode: str) -> Config:
    return load_config(None, [f"dense.device={dense}", f"attention.device={attention}", f"launch.mps={mode}"])


@pytest.mark.parametrize(
    ("dense", "attention"), [("auto", "auto"), ("auto", "cuda"), ("cuda", "cuda:0"), ("cuda:1", "cuda:1")]
)
def test_workers_that_share_a_gpu_get_a_daemon(started: list[Path], tmp_path: Path, dense: str, attention: str) -> None:
    with structlog.testing.capture_logs() as logs:
        assert mps.start_mps(config(dense, attention, "auto"), tmp_path) is not None
    assert started == [tmp_path / "mps"] and logs == []


@pytest.mark.parametrize(
    ("dense", "workers", "is_shared"),
    [
        ("auto", ('attention.devices=["cuda:0", "cuda:1"]',), True),
        ("cuda:2", ('attention.devices=["cuda:0", "cuda:1"]',), False),
        ("cuda:0", ("attention.device=cuda:1",), True),
    ],
)
def test_several_attention_workers_get_a_daemon_if_any_of_them_share(
    started: list[Path], tmp_path: Path, dense: str, workers: tuple[str, ...], is_shared: bool
) -> None:
    several = load_config(None, [f"dense.device={dense}", "attention.workers=2", *workers])
    assert (mps.start_mps(several, tmp_path) is not None) == is_shared == bool(started)


@pytest.mark.parametrize(("dense", "attention"), [("cpu", "cpu"), ("cuda", "cpu"), ("cuda:0", "cuda:1")])
def test_workers_on_different_devices_get_no_daemon_and_no_warning(
    started: list[Path], tmp_path: Path, dense: str, attention: str
) -> None:
    with structlog.testing.capture_logs() as logs:
        assert mps.start_mps(config(dense, attention, "auto"), tmp_path) is None
    assert started == [] and logs == []
    with pytest.raises(PeerError, match=rf"'on'.* share no GPU: dense\.device is '{dense}', .* '{attention}'"):
        mps.start_mps(config(dense, attention, "on"), tmp_path)


@pytest.mark.parametrize(
    ("mode", "has_mps", "reason"),
    [("off", True, "launch.mps is 'off'"), ("auto", False, "this machine has no nvidia-cuda-mps-control")],
)
def test_sharing_a_gpu_without_mps_logs_a_warning(
    started: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, has_mps: bool, reason: str
) -> None:
    monkeypatch.setattr(mps, "has_mps", lambda: has_mps)
    with structlog.testing.capture_logs() as logs:
        assert mps.start_mps(config("auto", "auto", mode), tmp_path) is None
    [line] = logs
    assert "without MPS" in line["event"] and line["reason"] == reason and line["log_level"] == "warning"
    assert started == []


def test_mps_that_is_configured_but_missing_is_an_error(
    started: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mps, "has_mps", lambda: False)
    with pytest.raises(PeerError, match="no nvidia-cuda-mps-control or no NVIDIA GPU"):
        mps.start_mps(config("auto", "auto", "on"), tmp_path)


def test_a_daemon_that_does_not_stop_is_logged_and_raises_no_error(started: list[Path], tmp_path: Path) -> None:
    daemon = mps.start_mps(config("auto", "auto", "auto"), tmp_path)
    assert daemon is not None
    with structlog.testing.capture_logs() as logs:
        mps.stop_mps(daemon)
    assert "left behind" in logs[0]["event"] and logs[0]["reason"] == "no answer"
