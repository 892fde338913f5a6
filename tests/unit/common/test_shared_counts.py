"""What the gateway processes of a server count together."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
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
def processes(path: Path) -> list[SharedCounts]:
    processes = [SharedCounts(path, index) for index in range(NUM_PROCESSES)]
    return processes


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
    there = {name: first.of_keys([name])[0] for name in names}
    for index, name in enumerate(names):
        for place, count in enumerate(there[name]):
            count.add(100 * index + place)
    for index, name in reversed(list(enumerate(names))):
        assert [count.total for count in second.of_keys([name])[0]] == [100 * index + place for place in range(3)]
    assert [count.total for count in second.of_keys(["another"])[0]] == [0, 0, 0]


def test_there_is_an_end_to_the_keys(processes: list[SharedCounts], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_counts, "MAX_KEYS", 2)
    for name in ("a", "b", "a"):
        processes[0].of_keys([name])[0]
    with pytest.raises(ConfigError, match=r"room for 2 API keys since the launcher has started, 'c' is one more"):
        processes[1].of_keys(["c"])[0]


def test_many_keys_take_the_lock_once_and_an_error_takes_no_place(
    processes: list[SharedCounts], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_counts, "MAX_KEYS", 4)
    locked = []
    take = shared_counts.fcntl.flock
    monkeypatch.setattr(shared_counts.fcntl, "flock", lambda *arguments: (locked.append(1), take(*arguments)))
    processes[0].of_keys(["a", "b", "a"])
    assert len(locked) == 1
    with pytest.raises(ConfigError, match="'e' is one more"):
        processes[1].of_keys(["a", "c", "d", "e"])
    first, second = processes[2].of_keys(["x", "y"])
    first.taken_requests.add(1)
    assert (processes[0].of_keys(["x"])[0].taken_requests.total, second.taken_requests.total) == (1, 0)


KILLED = """
import signal, sys
from pathlib import Path
from services.common.shared_counts import SharedCounts
counts = SharedCounts(Path(sys.argv[1]), 1)
counts.gauge("waiting").add(5)
answers, requests, tokens = counts.of_keys(["team"])[0]
answers.add(2); requests.add(3); tokens.add(400)
print("counted", flush=True)
signal.pause()
"""


def test_what_a_killed_process_had_open_ends_when_its_successor_begins(
    path: Path, processes: list[SharedCounts]
) -> None:
    waiting, of_key = processes[0].gauge("waiting"), processes[0].of_keys(["team"])[0]
    process = subprocess.Popen([sys.executable, "-c", KILLED, str(path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "counted\n"
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    process.stdout.close()
    assert waiting.total == 5 and [count.total for count in of_key] == [2, 3, 400]
    successor = SharedCounts(path, 1)
    successor.gauge("waiting")
    later = successor.of_keys(["team"])[0]
    assert waiting.total == 0 and [count.total for count in of_key] == [0, 3, 400], "what was taken was taken"
    later.taken_tokens.add(1)
    assert of_key.taken_tokens.total == 401


def test_a_process_that_keeps_the_lock_is_an_error(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_counts, "_LOCK_TIMEOUT_S", 0.05)
    first, second = SharedCounts(path, 0), SharedCounts(path, 1)
    with first._locked(0.0), pytest.raises(PeerError, match=r"held the lock of the shared counts for 0\.05 s"):
        second.of_keys(["team"])
    second.of_keys(["team"])


def test_a_process_alone_counts_for_itself() -> None:
    counts = Counts()
    first, second = counts.gauge("waiting"), counts.gauge("waiting")
    first.add(3)
    assert (first.total, first.others, second.total) == (3, 0, 0)
    assert not counts.is_shared
