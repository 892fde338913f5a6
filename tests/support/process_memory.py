"""Reads the memory of a process."""

from __future__ import annotations

from pathlib import Path


def resident_bytes(pid: int, field: str = "VmRSS") -> int:
    """Bytes in memory now; with `VmHWM` the maximum so far."""
    [line] = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith(f"{field}:")]
    return int(line.split()[1]) * 1024
