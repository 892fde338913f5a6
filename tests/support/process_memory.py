"""How much memory a process has."""

from __future__ import annotations

from pathlib import Path


def resident_bytes(pid: int, field: str = "VmRSS") -> int:
    """What of it lies in memory now; by `VmHWM` the most that ever did."""
    [line] = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith(f"{field}:")]
    return int(line.split()[1]) * 1024
