"""Logging never fails. Lines that cannot be written are dropped; the next written line contains their number."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog

from services.common.config import LogSection
from services.common.logs import LogLines, configure_logs

FULL = Path("/dev/full")
TIMEOUT_S = 60.0


@pytest.fixture
def stderr(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[int]:
    """The file descriptor of a configured logger's output, the file `stderr` in `tmp_path`."""
    config = structlog.get_config()
    with (tmp_path / "stderr").open("w") as file:
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stderr", file)
            configure_logs(LogSection(format="json"), "test", tmp_path / "error")
        yield file.fileno()
    structlog.configure(**config)


def lines_of(tmp_path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (tmp_path / "stderr").read_text().splitlines()]


def redirect(stderr: int, path: Path) -> None:
    with path.open("a") as file:
        os.dup2(file.fileno(), stderr)


def test_the_number_of_lost_lines_is_logged_once(stderr: int, tmp_path: Path) -> None:
    log = structlog.get_logger()
    log.info("before")
    redirect(stderr, FULL)
    for _ in range(3):
        log.warning("lost")
    redirect(stderr, tmp_path / "stderr")
    log.info("after")
    log.info("later")
    counts = [(line["event"], line.get("num_dropped_lines")) for line in lines_of(tmp_path)]
    assert counts == [("before", None), ("after", 3), ("later", None)]


def test_an_error_is_stored_for_the_launcher_if_the_disk_has_room(stderr: int, tmp_path: Path) -> None:
    log = structlog.get_logger()
    log.error("failed", error="why")
    assert (tmp_path / "error").read_text() == "failed: why"
    (tmp_path / "error").unlink()
    (tmp_path / "error").symlink_to(FULL)
    log.error("failed again", error="why")
    assert [line["event"] for line in lines_of(tmp_path)] == ["failed", "failed again"]


def test_a_line_with_a_lone_surrogate_is_written(stderr: int, tmp_path: Path) -> None:
    structlog.get_logger().info("half a \udcff pair")
    assert len(lines_of(tmp_path)) == 1


def test_a_full_or_closed_pipe_loses_only_lines() -> None:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    lines = LogLines(writer)
    long = 10_000 * "x"
    while not lines.num_dropped:
        lines.msg(long)  # until the pipe is full and ends with part of a line
    received = os.read(reader, 1 << 20)
    lines.msg("whole")
    assert os.read(reader, 1 << 20) == b"\nwhole\n"
    assert not received.endswith(b"\n") and received.count(b"\n") == len(received) // len(long + "\n")
    os.close(reader)
    lines.msg("for nobody")
    assert lines.num_dropped == 2
    os.close(writer)


def test_a_process_that_cannot_log_ends_normally() -> None:
    program = (
        "import structlog; from services.common.config import LogSection;"
        "from services.common.logs import configure_logs, print_to_stderr;"
        "from services.rpc.server import run_service\n"
        "async def main(): structlog.get_logger().error('lost'); print_to_stderr('lost')\n"
        "configure_logs(LogSection(), 'test'); run_service(main())"
    )
    with FULL.open("w") as full:
        assert subprocess.run([sys.executable, "-c", program], stderr=full, timeout=TIMEOUT_S).returncode == 0
