"""`describe_hang`: what a process that is to be killed because it hangs is doing, for the launcher's log.

A process that is dead leaves no trace of what it waited for. The kernel says of each thread in which of its functions
it sleeps, and how long it has run and waited for a CPU; the process itself writes the stacks of its Python threads.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import NamedTuple

from services.common.process import STACKS_FILE, STACKS_SIGNAL

MAX_THREADS = 32
MAX_STACK_CHARS = 1 << 14
WRITE_S = 3.0  # for a process to write its stacks
LAST = "Current thread"  # begins the last stack, of the main thread, which takes the signal
QUIET_S = 0.25  # without a further line of it: they are complete
POLL_S = 0.01


class Hang(NamedTuple):
    """What a process did."""

    threads: str
    stacks: str  # innermost call of each thread first; if there are none to be had, why


def describe_hang(pid: int) -> Hang:
    """What the process `pid` does now. Takes up to `WRITE_S` seconds, and raises nothing."""
    return Hang(_threads_of(pid), _shorten(_stacks_of(pid)))


def _threads_of(pid: int) -> str:
    """Its threads, the main one first: name, state, where in the kernel, seconds it has run and waited for a CPU."""
    try:
        threads = sorted(map(int, os.listdir(f"/proc/{pid}/task")))
    except OSError as error:
        return str(error)
    lines = [_describe_thread(Path(f"/proc/{pid}/task/{each}")) for each in threads[:MAX_THREADS]]
    if len(threads) > MAX_THREADS:
        lines.append(f"and {len(threads) - MAX_THREADS} more")
    return "; ".join([*lines, _describe_reads(pid)])


def _describe_thread(directory: Path) -> str:
    try:
        status = dict(line.split(":\t", 1) for line in (directory / "status").read_text(errors="replace").splitlines())
        ran, waited, _ = (directory / "schedstat").read_text().split()
        words = [f"{directory.name} {status['Name']}: {status['State']}", f"ran {int(ran) / 1e9:.2f} s"]
        words += [f"waited for a CPU {int(waited) / 1e9:.2f} s"]
        words += [f"switches {status['voluntary_ctxt_switches']} + {status['nonvoluntary_ctxt_switches']}"]
        with contextlib.suppress(OSError):  # the kernel may keep it to itself
            words.insert(1, f"in {(directory / 'wchan').read_text()}")
        return ", ".join(words)
    except (OSError, KeyError, ValueError) as error:  # it has ended, or the kernel counts none of this
        return f"{directory.name}: {error}"


def _describe_reads(pid: int) -> str:
    """A start takes long if the page cache has lost the modules and the storage is slow; no other figure shows it."""
    try:
        counts = dict(line.split(": ") for line in Path(f"/proc/{pid}/io").read_text().splitlines())
        faults = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[9]
        return f"read {int(counts['read_bytes']) >> 20} MiB from storage, {faults} major faults"
    except (OSError, KeyError, ValueError) as error:
        return f"reads: {error}"


def _stacks_of(pid: int) -> str:
    """Has the process write its stacks, and reads them."""
    try:
        file = next((each for each in Path(f"/proc/{pid}/fd").iterdir() if _is_of_stacks(each)), None)
        if file is None:
            return "it has not begun to run Python code of ours, or cannot write them"
        status = Path(f"/proc/{pid}/status").read_text(errors="replace")
        if "State:\tT" in status:
            return "it is stopped (SIGSTOP) and writes nothing"
        num_earlier = len(file.read_bytes())
        text, now = "", time.monotonic()
        changed_at, ends_at = now, now + WRITE_S
        os.kill(pid, STACKS_SIGNAL)
        while now < ends_at and not (LAST in text and now - changed_at > QUIET_S):
            time.sleep(POLL_S)
            before, now = text, time.monotonic()
            text = file.read_bytes()[num_earlier:].decode(errors="backslashreplace")
            if text != before:
                changed_at = now
        return text or f"it has not written them within {WRITE_S:g} s"
    except OSError as error:  # it has ended, or belongs to somebody else
        return str(error)


def _is_of_stacks(file: Path) -> bool:
    with contextlib.suppress(OSError):
        return os.readlink(file).startswith(f"/memfd:{STACKS_FILE} ")
    return False


def _shorten(text: str) -> str:
    """Leaves out the middle of a long text: the main thread comes last."""
    half = MAX_STACK_CHARS // 2
    return text if len(text) <= MAX_STACK_CHARS else f"{text[:half]}\n[...]\n{text[-half:]}"
