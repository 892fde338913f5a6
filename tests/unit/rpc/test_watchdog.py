"""When a service counts as stalled, and what its watchdog reports."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path

import pytest

from services.common.config import LogSection
from services.common.logs import configure_logs
from services.pb import stall_pb2
from services.rpc.watchdog import CHECKS_PER_BOUND, Progress, Watchdog, describe_stall

STALL_TIMEOUT_S = 8.0
INTERVAL_S = STALL_TIMEOUT_S / CHECKS_PER_BOUND


class Watched:
    """A watchdog with the progress it reads and the stalls it has reported."""

    def __init__(self) -> None:
        self.progress: Progress | None = None
        self.reported: list[stall_pb2.Stall | None] = []
        self.now = 100.0
        self.watchdog = Watchdog("dense_worker", lambda: self.progress, self._on_stall, STALL_TIMEOUT_S)

    async def _on_stall(self, stall: stall_pb2.Stall | None) -> None:
        self.reported.append(stall)

    def check(self, count: int, every_s: float = INTERVAL_S) -> None:
        for _ in range(count):
            self.now += every_s
            asyncio.run(self.watchdog.check(self.now))


def test_a_stall_is_reported_once_and_withdrawn_with_the_next_progress() -> None:
    watched = Watched()
    watched.progress = Progress((1,), step_id=7, layer=2, request_ids=("a", "b"), waits_for="attn_worker")
    watched.check(CHECKS_PER_BOUND)
    assert watched.watchdog.stall is None
    watched.check(4)
    [stall] = watched.reported
    assert stall is not None
    assert (stall.role, stall.step_id, stall.layer) == ("dense_worker", 7, 2)
    assert (list(stall.request_ids), stall.waits_for, stall.stalled_s) == (["a", "b"], "attn_worker", STALL_TIMEOUT_S)
    assert describe_stall(stall) == (
        "dense_worker has made no progress for 8.0 s, step 7, layer 2, requests a, b, waits for attn_worker"
    )
    assert watched.watchdog.stall is not None and watched.watchdog.stall.stalled_s > STALL_TIMEOUT_S
    watched.progress = Progress((2,), step_id=8)
    watched.check(1)
    assert watched.reported == [stall, None] and watched.watchdog.stall is None


def test_a_stall_is_reported_again_when_waiting_turns_into_computing() -> None:
    watched = Watched()
    watched.progress = Progress((1,), waits_for="attn_worker")
    watched.check(2 * CHECKS_PER_BOUND)
    watched.progress = Progress((1,))
    watched.check(2)
    assert [stall and stall.waits_for for stall in watched.reported] == ["attn_worker", ""]


def test_a_service_without_work_is_never_stalled() -> None:
    watched = Watched()
    watched.check(10 * CHECKS_PER_BOUND)
    watched.progress = Progress((0,))
    watched.check(CHECKS_PER_BOUND)  # the time without work does not count
    assert watched.reported == []


def test_slow_progress_is_progress() -> None:
    watched = Watched()
    for layer in range(5):
        watched.progress = Progress((layer,))
        watched.check(CHECKS_PER_BOUND)
    assert watched.reported == []


def test_time_in_which_the_process_was_stopped_does_not_count() -> None:
    watched = Watched()
    watched.progress = Progress((1,))
    watched.check(2)
    watched.check(1, every_s=100 * STALL_TIMEOUT_S)
    assert watched.reported == []
    watched.check(CHECKS_PER_BOUND)
    assert len(watched.reported) == 1


def test_the_stacks_of_a_stalled_service_are_one_event_of_its_log(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    may_end = threading.Event()

    def hang_in_a_known_place() -> None:
        may_end.wait()

    thread = threading.Thread(target=hang_in_a_known_place)
    thread.start()
    configure_logs(LogSection(format="json"), "dense_worker", tmp_path / "error")
    watched = Watched()
    watched.progress = Progress((1,), step_id=7)
    watched.check(2 * CHECKS_PER_BOUND)
    may_end.set()
    thread.join()
    stacks, stalled = [json.loads(line) for line in capfd.readouterr().err.splitlines()]
    assert stalled["event"] == "stalled" and stacks["level"] == "error" and stacks["role"] == "dense_worker"
    assert "in hang_in_a_known_place\n" in stacks["stack"] and "in check\n" in stacks["stack"]
    assert (tmp_path / "error").read_text().startswith("stalled: "), "the launcher tells why it was killed"
