"""What the log says of a process that hangs, before it is killed."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from services.launch.hang import MAX_STACK_CHARS, MAX_THREADS, describe_hang

BEGIN = """
import sys, threading, time
from services.common.process import write_stacks_at_signal

def sleep_for_ever():
    time.sleep(1000)

def recurse(depth):
    if depth:
        recurse(depth - 1)
    else:
        started.wait()
        time.sleep(1000)

"""
SLEEPS = """
write_stacks_at_signal()
threading.Thread(target=sleep_for_ever, name="sleeper", daemon=True).start()
print(flush=True)
time.sleep(1000)
"""
# One C call that never gives the interpreter lock away.
HOLDS_LOCK = """
write_stacks_at_signal()
print(flush=True)
any(map(bool.__call__, iter(int, 1)))
"""
MANY_THREADS = """
write_stacks_at_signal()
sys.setrecursionlimit(10_000)
started = threading.Barrier(81)
for _ in range(80):
    threading.Thread(target=recurse, args=(90,), daemon=True).start()
started.wait()
print(flush=True)
sleep_for_ever()
"""
WRITES_NONE = """
print(flush=True)
time.sleep(1000)
"""


@contextmanager
def running(code: str) -> Iterator[int]:
    with subprocess.Popen([sys.executable, "-c", BEGIN + code], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None and process.stdout.readline()
            yield process.pid
        finally:
            process.kill()


def test_a_process_that_sleeps_says_where_in_each_thread() -> None:
    with running(SLEEPS) as pid:
        while (hang := describe_hang(pid)).threads.count("S (sleeping)") < 2:
            assert os.waitpid(pid, os.WNOHANG) == (0, 0), "it goes on"
    assert "in sleep_for_ever" in hang.stacks and "in <module>" in hang.stacks
    main, other, reads = hang.threads.split("; ")
    assert main.startswith(f"{pid} python") and "ran 0." in main
    assert "waited for a CPU" in other
    assert re.fullmatch(r"read \d+ MiB from storage, \d+ major faults", reads)


def test_a_process_that_holds_the_interpreter_lock_says_where() -> None:
    with running(HOLDS_LOCK) as pid:
        assert "in <module>" in describe_hang(pid).stacks


def test_of_many_threads_the_first_ones_and_of_long_stacks_the_ends_are_kept() -> None:
    with running(MANY_THREADS) as pid:
        while "in sleep_for_ever" not in (hang := describe_hang(pid)).stacks:
            assert "in recurse" in hang.stacks, "a busy machine: not yet all of them"
    assert hang.threads.count(";") == MAX_THREADS + 1 and f"; and {81 - MAX_THREADS} more; " in hang.threads
    assert len(hang.stacks) < MAX_STACK_CHARS + 100 and "\n[...]\n" in hang.stacks


def test_a_process_without_the_means_is_not_ended_by_the_question() -> None:
    with running(WRITES_NONE) as pid:
        assert "has not begun" in describe_hang(pid).stacks
        assert os.waitpid(pid, os.WNOHANG) == (0, 0)


def test_a_stopped_process_is_said_to_be_stopped() -> None:
    with running(SLEEPS) as pid:
        os.kill(pid, signal.SIGSTOP)
        os.waitpid(pid, os.WUNTRACED)
        hang = describe_hang(pid)
    assert "SIGSTOP" in hang.stacks and "T (stopped)" in hang.threads


def test_a_process_that_has_ended_raises_nothing() -> None:
    with subprocess.Popen(["true"]) as process:
        pass
    hang = describe_hang(process.pid)
    assert "No such" in hang.threads and "No such" in hang.stacks
