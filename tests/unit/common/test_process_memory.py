"""Memory and priority of processes, as the kernel reports them."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from services.common import process
from services.common.process import (
    LOW_PRIORITY,
    available_bytes,
    available_cores,
    low_priority_thread,
    proportional_bytes,
)


def test_the_memory_of_a_process_grows_by_what_it_writes() -> None:
    code = "import sys; kept = []\nfor line in sys.stdin: kept.append(bytearray(b'x') * (64 << 20)); print(flush=True)"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None and process.stdout is not None
        before = proportional_bytes(process.pid)
        process.stdin.write(b"\n")
        process.stdin.flush()
        process.stdout.readline()
        assert 60 << 20 < proportional_bytes(process.pid) - before < 80 << 20
        process.stdin.close()
    assert proportional_bytes(process.pid) == 0, "it has ended"


FREES = """
import os, threading
from services.common.process import give_back_large_blocks, proportional_bytes
give_back_large_blocks()
small = []
def work():
    del [bytes(bytearray(20 << 20))][0]  # the first one that is freed changes what is kept
    blocks = [bytes(bytearray(12 << 20)) for _ in range(10)]
    small.append(bytes(1000))  # behind them
before = proportional_bytes(os.getpid())
threads = [threading.Thread(target=work) for _ in range(4)]
for thread in threads: thread.start()
for thread in threads: thread.join()
print(proportional_bytes(os.getpid()) - before)
"""


def test_large_blocks_are_given_back_when_they_are_freed() -> None:
    """Also those of threads, each of which has a heap of its own."""
    found = subprocess.run([sys.executable, "-c", FREES], capture_output=True, text=True, timeout=60, check=True)
    assert int(found.stdout) < 12 << 20


def test_no_more_memory_is_available_than_the_machine_has() -> None:
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0 < available_bytes() < total


def test_a_control_groups_limit_counts_without_pages_of_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = Path("/proc/self/cgroup").read_text().splitlines()
    group = next((line.removeprefix("0::/") for line in lines if line.startswith("0::")), None)
    if group is None:
        pytest.skip("this kernel has no control groups of version 2")
    monkeypatch.setattr(process, "CGROUPS", tmp_path)
    unlimited = available_bytes()
    own = tmp_path / group
    own.mkdir(parents=True, exist_ok=True)
    (own / "memory.max").write_text("max\n")
    (own / "memory.current").write_text(f"{90 << 20}\n")
    (own / "memory.stat").write_text(f"anon {20 << 20}\nactive_file {30 << 20}\ninactive_file {40 << 20}\n")
    assert available_bytes() > unlimited // 2
    (own / "memory.max").write_text(f"{100 << 20}\n")
    assert available_bytes() == 80 << 20
    (own / "memory.max").write_text(f"{10 << 20}\n")
    assert available_bytes() == 0


@pytest.mark.parametrize(
    ("quota", "expected"), [("max 100000", 16), ("250000 100000", 2), ("50000 100000", 1), ("6400000 100000", 16)]
)
def test_a_control_groups_quota_of_cores_counts(
    quota: str, expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = Path("/proc/self/cgroup").read_text().splitlines()
    group = next((line.removeprefix("0::/") for line in lines if line.startswith("0::")), None)
    if group is None:
        pytest.skip("this kernel has no control groups of version 2")
    monkeypatch.setattr(process, "CGROUPS", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))
    (tmp_path / group).mkdir(parents=True, exist_ok=True)
    (tmp_path / group / "cpu.max").write_text(f"{quota}\n")
    assert available_cores() == expected


def test_only_the_thread_and_those_that_it_starts_have_a_low_priority() -> None:
    def priorities() -> tuple[int, int]:
        found: list[int] = []
        inner = threading.Thread(target=lambda: found.append(os.getpriority(os.PRIO_PROCESS, 0)))
        inner.start()
        inner.join()
        return os.getpriority(os.PRIO_PROCESS, 0), found[0]

    before = os.getpriority(os.PRIO_PROCESS, 0)
    with low_priority_thread() as thread:
        lower = min(19, before + LOW_PRIORITY)
        assert thread.submit(priorities).result() == (lower, lower)
    assert priorities() == (before, before)
