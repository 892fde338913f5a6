"""What the operating system says of this process."""

from __future__ import annotations

import ctypes
import os
import resource
import signal

_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Lets the kernel send SIGINT (end at once) to this process when its parent ends, however that happens."""
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGINT)
    if os.getppid() != parent:  # it ended in between
        os.kill(os.getpid(), signal.SIGINT)


def resident_bytes() -> int:
    """Memory of this process that is in RAM, shared pages included."""
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * resource.getpagesize()
