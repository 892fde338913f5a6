"""Log lines for a person: short, harmless to the terminal, and whole where something went wrong."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest

from services.common.terminal import ERASE_LINE, progress_bar, terminal_line
from tests.support.terminal import terminal

TIMEOUT_S = 10.0
NOW = datetime(2026, 11, 25, 21, 42, 36, tzinfo=UTC)


def event(level: str, name: str, **values: Any) -> dict[str, Any]:
    return {"level": level, "service": "gateway", "event": name, "timestamp": NOW.isoformat(), **values}


def test_a_line_is_cut_to_the_terminal_unless_it_warns() -> None:
    long = 200 * "x"
    shown = terminal_line(event("info", "serving", address=long), 60).removeprefix(ERASE_LINE)
    assert len(shown) == 60 and shown.endswith("x…")
    assert shown.startswith(f"{NOW.astimezone():%H:%M:%S} gateway      serving address=xxx")
    assert long in terminal_line(event("warning", "refused", reason=long), 60)


def test_nothing_that_a_client_sends_moves_the_cursor_or_changes_colours() -> None:
    hostile = "a\x1b[2J\r\x9b31m\u202eb\nc"
    for level in ("info", "error"):
        line = terminal_line(event(level, "call cut", request_id=hostile, exception=hostile), 200)
        plain = line.removeprefix(ERASE_LINE).replace("\x1b[31m", "", 1).replace("\x1b[m", "", 1)
        assert not set("\x1b\r\x9b\u202e") & set(plain)
        assert r"request_id=a\x1b[2J\r\x9b31m\u202eb c" in plain


@pytest.mark.parametrize("key", ["exception", "stack"])
def test_an_error_ends_with_its_traceback_or_stacks(key: str) -> None:
    line = terminal_line(event("error", "failed", **{key: "Traceback\n  in f\nValueError: 7"}), 20)
    assert line.endswith("\nTraceback\n  in f\nValueError: 7")


def test_a_bar_of_counts_goes_when_all_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    def wait_for(condition: Callable[[list[str]], bool]) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while not condition(screen.lines()):
            assert time.monotonic() < deadline, screen.lines()
            time.sleep(0.01)

    with terminal(80) as screen, os.fdopen(os.dup(screen.file), "w") as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        with progress_bar("capturing graphs", 7, " graphs") as advance:
            wait_for(lambda lines: "capturing graphs:   0%" in lines[0] and " 0/7 " in lines[0])
            for _ in range(7):
                advance(1)
        print("after", file=stream, flush=True)
        wait_for(lambda lines: lines == ["after", ""])


def test_without_a_terminal_there_is_no_bar(capfd: pytest.CaptureFixture[str]) -> None:
    with progress_bar("loading", 7) as advance:
        advance(7)
    assert capfd.readouterr().err == ""
