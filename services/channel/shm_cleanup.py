"""Names of shared-memory regions, and the removal of regions that killed processes left behind. Needs no torch."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

SHM_DIR = Path("/dev/shm")
NAME_PREFIX = "twostroke-"


def remove_stale_regions() -> list[str]:
    """Removes regions whose creator is dead and returns their names."""
    removed = []
    for path in SHM_DIR.glob(f"{NAME_PREFIX}*"):
        try:
            file = os.open(path, os.O_RDWR)
        except OSError:
            continue  # another user's, or just removed
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink(missing_ok=True)  # its creator, or another cleanup, may have removed it already
            removed.append(path.name)
        except BlockingIOError:
            pass  # its creator lives
        finally:
            os.close(file)
    return removed
