"""Reads CPU time, memory and file descriptors of a running process from the kernel. Linux only."""

from __future__ import annotations

import os
import resource
from pathlib import Path

TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def cpu_s(pid: int) -> float:
    """User and system time of all threads of the process so far, in seconds, in steps of 10 ms."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()  # the name may contain any character
    user, system = fields[11:13]
    return (int(user) + int(system)) / TICKS_PER_S


def resident_bytes(pid: int) -> int:
    """Memory that is in RAM, pages shared with other processes included."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()


def num_files(pid: int) -> int:
    """Open file descriptors."""
    return len(os.listdir(f"/proc/{pid}/fd"))


def children(pid: int) -> list[int]:
    """Process ids of the direct children of a process."""
    return [
        int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()
    ]
