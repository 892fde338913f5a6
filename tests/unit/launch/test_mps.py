"""Starting and stopping the MPS daemon, with a simulated NVIDIA program. Every call ends, or fails with a reason."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from services.common.errors import PeerError
from services.launch import mps
from services.launch.mps import CONTROL, MpsDaemon

TIMEOUT_S = 2.0
# Like the real program, as far as needed here: `-d` starts a daemon, and `quit` ends it.
WORKING = """
if [ "$1" = -d ]; then echo "devices: $CUDA_VISIBLE_DEVICES" > "$CUDA_MPS_PIPE_DIRECTORY/daemon"; exit; fi
read command
case "$command" in
  get_server_list) echo 11; echo 12;;
  "get_client_list 11") echo 101; echo 102;;
  "get_client_list 12") echo 103;;
  quit) rm "$CUDA_MPS_PIPE_DIRECTORY/daemon";;
esac
"""
HANGING = "exec sleep 60"
MUTE = """
if [ "$1" = -d ]; then touch "$CUDA_MPS_PIPE_DIRECTORY/daemon"; exit; fi
read command
if [ "$command" = quit ]; then rm "$CUDA_MPS_PIPE_DIRECTORY/daemon"; exit; fi
exec sleep 60
"""
FAILING = "echo 'no permission' >&2; exit 3"


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The daemon's directory. Its parent is first in PATH, so tests install the program there."""
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(mps, "ANSWER_TIMEOUT_S", TIMEOUT_S)
    return tmp_path / "mps"


def install(directory: Path, script: str, mode: int = 0o700) -> None:
    path = directory.parent / CONTROL
    path.write_text(f"#!/bin/sh\n{script}")
    path.chmod(mode)


def daemons(directory: Path) -> list[Path]:
    return list((directory / "pipe").glob("daemon"))


def test_clients_of_all_servers_are_listed_and_stop_ends_the_daemon(directory: Path) -> None:
    install(directory, WORKING)
    daemon = MpsDaemon(directory)
    daemon.start()
    assert daemon.client_pids() == {101, 102, 103}
    assert daemons(directory)
    daemon.stop()
    assert not daemons(directory)


def test_gpu_indices_have_the_same_meaning_with_and_without_the_daemon(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the documentation of MPS, with the variable set for both, a client's indices refer to the daemon's devices."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2")
    install(directory, WORKING)
    daemon = MpsDaemon(directory)
    daemon.start()
    assert [each.read_text() for each in daemons(directory)] == ["devices: \n"]
    assert daemon.environment["CUDA_VISIBLE_DEVICES"] == "2"
    daemon.stop()


@pytest.mark.parametrize(
    ("script", "message"),
    [
        (HANGING, rf"does not answer: {CONTROL} -d takes over {TIMEOUT_S} s"),
        (MUTE, rf"does not answer: {CONTROL} takes over {TIMEOUT_S} s"),
        (FAILING, rf"{CONTROL} -d failed with 3: no permission"),
    ],
    ids=["hanging", "mute", "failing"],
)
def test_a_broken_daemon_is_an_error_in_bounded_time_and_not_left_behind(
    directory: Path, script: str, message: str
) -> None:
    install(directory, script)
    start = time.monotonic()
    with pytest.raises(PeerError, match=message):
        MpsDaemon(directory).start()
    assert time.monotonic() - start < 10 * TIMEOUT_S
    assert not daemons(directory)


def test_the_error_names_a_program_that_cannot_be_run(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(directory, WORKING, mode=0o600)
    monkeypatch.setenv("PATH", str(directory.parent))
    with pytest.raises(PeerError, match=rf"{CONTROL} cannot be run: Permission denied"):
        MpsDaemon(directory).start()
