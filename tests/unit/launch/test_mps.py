"""The MPS daemon's life, with a stand-in for NVIDIA's program: whatever that does, every call ends and says why."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from services.common.errors import PeerError
from services.launch import mps
from services.launch.mps import CONTROL, MpsDaemon

TIMEOUT_S = 0.5
# Does what the real one does as far as it matters here: `-d` leaves a daemon, which `quit` ends.
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
    """The daemon's own; its program is looked for beside it first."""
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(mps, "ANSWER_TIMEOUT_S", TIMEOUT_S)
    return tmp_path / "mps"


def install(directory: Path, script: str, mode: int = 0o700) -> None:
    path = directory.parent / CONTROL
    path.write_text(f"#!/bin/sh\n{script}")
    path.chmod(mode)


def daemons(directory: Path) -> list[Path]:
    return list((directory / "pipe").glob("daemon"))


def test_clients_of_all_servers_are_told_and_stop_leaves_no_daemon(directory: Path) -> None:
    install(directory, WORKING)
    daemon = MpsDaemon(directory)
    daemon.start()
    assert daemon.client_pids() == {101, 102, 103}
    assert daemons(directory)
    daemon.stop()
    assert not daemons(directory)


def test_indices_of_gpus_mean_to_a_client_what_they_mean_without_the_daemon(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The documentation of MPS: with the variable set for both, a client's indices count the daemon's devices."""
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
def test_a_broken_daemon_is_named_within_a_bound_and_not_left_behind(
    directory: Path, script: str, message: str
) -> None:
    install(directory, script)
    start = time.monotonic()
    with pytest.raises(PeerError, match=message):
        MpsDaemon(directory).start()
    assert time.monotonic() - start < 10 * TIMEOUT_S
    assert not daemons(directory)


def test_a_program_that_cannot_be_run_is_named(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(directory, WORKING, mode=0o600)
    monkeypatch.setenv("PATH", str(directory.parent))
    with pytest.raises(PeerError, match=rf"{CONTROL} cannot be run: Permission denied"):
        MpsDaemon(directory).start()
