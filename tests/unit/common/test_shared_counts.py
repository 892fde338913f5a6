"""What the gateway processes of a server count together."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.common import shared_counts
from services.common.errors import ConfigError, PeerError
from services.common.shared_counts import GAUGES, Counts, SharedCounts
from tests.support.examples import examples

NUM_PROCESSES = 3


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "counts"
    SharedCounts.make(path, NUM_PROCESSES)
    return path


@pytest.fixture
def processes(path: Path) -> Iterator[list[SharedCounts]]:
    processes = [SharedCounts(path, index) for index in range(NUM_PROCESSES)]
    yield processes
    for each in processes:
        each.close()


@settings(max_examples=examples(100, 20))
@given(st.lists(st.tuples(st.integers(0, NUM_PROCESSES - 1), st.sampled_from(GAUGES), st.integers(-9, 2**40))))
def test_each_process_sees_the_sum(
    tmp_path_factory: pytest.TempPathFactory, changes: list[tuple[int, str, int]]
) -> None:
    path = tmp_path_factory.mktemp("counts") / "counts"
    SharedCounts.make(path, NUM_PROCESSES)
    processes = [SharedCounts(path, index) for index in range(NUM_PROCESSES)]
    gauges = [{name: process.gauge(name) for name in GAUGES} for process in processes]
    for index, name, amount in changes:
        gauges[index][name].add(amount)
    for name in GAUGES:
        total = sum(amount for _, changed, amount in changes if changed == name)
        for index, each in enumerate(gauges):
            own = sum(amount for changer, changed, amount in changes if (changer, changed) == (index, name))
            assert (each[name].own, each[name].others, each[name].total) == (own, total - own, total)


def test_keys_have_the_same_place_in_all_processes_in_whatever_order_they_come(processes: list[SharedCounts]) -> None:
    first, second, _ = processes
    names = [f"team-{index}" for index in range(20)]
    there = {name: first.of_key(name) for name in names}
    for index, name in enumerate(names):
        for place, count in enumerate(there[name]):
            count.add(100 * index + place)
    for index, name in reversed(list(enumerate(names))):
        assert [count.total for count in second.of_key(name)] == [100 * index + place for place in range(3)]
    assert [count.total for count in second.of_key("another")] == [0, 0, 0]


def test_there_is_an_end_to_the_keys(processes: list[SharedCounts], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_counts, "MAX_KEYS", 2)
    for name in ("a", "b", "a"):
        processes[0].of_key(name)
    with pytest.raises(ConfigError, match=r"room for 2 API keys since the launcher has started, 'c' is one more"):
        processes[1].of_key("c")


KILLED = """
import signal, sys
from pathlib import Path
from services.common.shared_counts import SharedCounts
counts = SharedCounts(Path(sys.argv[1]), 1)
counts.gauge("waiting").add(5)
answers, requests, tokens = counts.of_key("team")
answers.add(2); requests.add(3); tokens.add(400)
print("counted", flush=True)
signal.pause()
"""


def test_what_a_killed_process_had_open_ends_when_its_successor_begins(
    path: Path, processes: list[SharedCounts]
) -> None:
    waiting, of_key = processes[0].gauge("waiting"), processes[0].of_key("team")
    process = subprocess.Popen([sys.executable, "-c", KILLED, str(path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "counted\n"
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    process.stdout.close()
    assert waiting.total == 5 and [count.total for count in of_key] == [2, 3, 400]
    successor = SharedCounts(path, 1)
    successor.gauge("waiting")
    later = successor.of_key("team")
    assert waiting.total == 0 and [count.total for count in of_key] == [0, 3, 400], "what was taken was taken"
    later.taken_tokens.add(1)
    assert of_key.taken_tokens.total == 401
    successor.close()


def test_a_process_that_keeps_the_lock_is_an_error(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_counts, "_LOCK_TIMEOUT_S", 0.05)
    first, second = SharedCounts(path, 0), SharedCounts(path, 1)
    first._lock()
    with pytest.raises(PeerError, match=r"held the lock of the shared counts for 0\.05 s"):
        second.of_key("team")
    first.close()
    second.of_key("team")
    second.close()


def test_a_process_alone_counts_for_itself() -> None:
    counts = Counts()
    first, second = counts.gauge("waiting"), counts.gauge("waiting")
    first.add(3)
    assert (first.total, first.others, second.total) == (3, 0, 0)
    assert not counts.is_shared
