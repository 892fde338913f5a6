"""Reads from the launcher's log how the workers of a chaos run ended, and whether the monkey caused it."""

from __future__ import annotations

import re
import signal
from collections.abc import Collection, Mapping
from dataclasses import dataclass

# The reasons that a signal may cause. The launcher kills a process that was stopped for good: a
# standby, too, if it does not take over.
EXPECTED_ENDS = {
    signal.SIGKILL: r"signal SIGKILL(, after|$)",
    signal.SIGTERM: r"exit code 0(, after|$)",
    signal.SIGSTOP: r"signal SIGKILL from the launcher: (no answer|it does not take over)",
}


EVENTS = '(restarting|"the standby takes over"|"the standby has ended")'


@dataclass(frozen=True)
class End:
    """The end of a process that the launcher restarted, or for which a standby took over, or of a standby."""

    role: str
    pid: int
    reason: str


def read_ends(log: str) -> list[End]:
    """All ends in a piece of the launcher's log."""
    lines = [line for line in log.splitlines() if re.search(f"service=launch event={EVENTS} role=", line)]
    found = [re.search(r' role=([\w-]+) .*?(?:old_)?pid=(\d+) reason=("(?:[^"\\]|\\.)*"|\S+)', line) for line in lines]
    assert all(found), lines
    return [End(each[1], int(each[2]), each[3].strip('"')) for each in found if each is not None]


def unexpected_ends(ends: Collection[End], signals: Mapping[int, Collection[signal.Signals]]) -> list[End]:
    """The ends that no signal explains. `signals`: all signals sent to each process."""
    patterns = {end: [EXPECTED_ENDS[number] for number in signals.get(end.pid, ())] for end in ends}
    return [end for end, each in patterns.items() if not any(re.match(pattern, end.reason) for pattern in each)]
