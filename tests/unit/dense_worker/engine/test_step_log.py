"""The step log has one line per step. Another thread writes it, so the engine thread never waits."""

from __future__ import annotations

import json
import os
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from services.common.errors import ConfigError
from services.dense_worker.engine.observer import StepStats
from services.dense_worker.engine.step_log import StepLog, line_of, writing_step_log

STATS = StepStats(
    step_id=7,
    num_seqs=3,
    num_tokens=20,
    num_sampled=2,
    num_output_tokens=2,
    num_running=3,
    num_waiting=1,
    num_preemptions=0,
    num_blocks=100,
    num_free_blocks=90,
    num_reserved_blocks=5,
    gap_s=0.00034,
    launch_s=0.00012,
    duration_s=0.005,
    wait_s=0.002,
    follow_up_s=0.0007,
    lane=1,
)


def test_a_line_has_batch_tokens_blocks_and_times() -> None:
    assert line_of(1700000000.5, STATS, 0) == {
        "timestamp": 1700000000.5,
        "step_id": 7,
        "lane": 1,
        "num_seqs": 3,
        "num_tokens": 20,
        "num_sampled": 2,
        "num_running": 3,
        "num_waiting": 1,
        "num_preemptions": 0,
        "num_blocks": 100,
        "num_free_blocks": 90,
        "num_reserved_blocks": 5,
        "gap_ms": 0.34,
        "launch_ms": 0.12,
        "duration_ms": 5.0,
        "wait_ms": 2.0,
        "draft_ms": 0.7,
    }
    assert "draft_ms" not in line_of(1700000000.5, replace(STATS, follow_up_s=0.0), 0), "nothing was drafted"


def test_an_existing_log_is_continued(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    for _ in range(2):
        with writing_step_log(path) as logs:
            for _ in range(3):
                logs[0].on_step(STATS, [], [])
    assert [json.loads(line)["step_id"] for line in path.read_text().splitlines()] == [7] * 6


def test_without_a_path_there_is_no_log() -> None:
    with writing_step_log(None) as logs:
        assert logs == []


def test_the_error_names_a_path_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=str(tmp_path)), writing_step_log(tmp_path):
        pass


class SlowFile:
    """A file whose writes wait for `may_write`."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.may_write = threading.Event()

    def write(self, line: str) -> None:
        assert self.may_write.wait(20.0)
        self.lines.append(line)


def test_lines_beyond_the_limit_are_dropped_and_counted() -> None:
    file = SlowFile()
    step_log = StepLog(file.write, max_num_pending=4)
    step_log.start()
    start = time.monotonic()
    for _ in range(50):
        step_log.on_step(STATS, [], [])
    assert time.monotonic() - start < 10.0, "the engine thread waited for the disk"
    file.may_write.set()
    deadline = time.monotonic() + 20.0
    while len(file.lines) < 4:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    step_log.on_step(STATS, [], [])
    step_log.stop()
    lines = [json.loads(line) for line in file.lines]
    assert sum(line.get("num_dropped_lines", 0) for line in lines) + len(lines) == 51
    assert lines[-1]["num_dropped_lines"] > 40


def test_a_full_disk_loses_only_lines_and_is_logged_once(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    path.symlink_to("/dev/full")
    with capture_logs() as events, writing_step_log(path) as [step_log]:
        for _ in range(10):
            step_log.on_step(STATS, [], [])
    assert [(event["event"], event["error"]) for event in events] == [
        ("lines of the step log are dropped", "No space left on device")
    ]


def test_an_error_at_the_close_of_the_log_does_no_harm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, close, is_told = tmp_path / "steps.jsonl", os.close, threading.Event()

    def close_full(file: int) -> None:
        is_of_log = os.path.samestat(os.fstat(file), path.stat())
        close(file)
        if is_of_log:
            is_told.set()
            raise OSError(28, "No space left on device")

    with writing_step_log(path) as [step_log]:
        step_log.on_step(STATS, [], [])
        monkeypatch.setattr(os, "close", close_full)
    assert is_told.is_set() and len(path.read_text().splitlines()) == 1


def test_after_a_full_disk_the_number_of_lost_lines_is_written() -> None:
    written: list[str] = []
    num_tries = 0

    def write(line: str) -> None:
        nonlocal num_tries
        num_tries += 1
        if num_tries <= 3:
            raise OSError(28, "No space left on device")
        written.append(line)

    step_log = StepLog(write)
    step_log.start()
    for _ in range(5):
        step_log.on_step(STATS, [], [])
    assert step_log.stop()
    assert [json.loads(line).get("num_dropped_lines") for line in written] == [3, None]
