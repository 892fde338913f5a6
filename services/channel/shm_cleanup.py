"""Names of shared-memory regions, and the removal of what killed processes left behind. Needs no torch."""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path

SHM_DIR = Path("/dev/shm")
NAME_PREFIX = "twostroke-"
FIRST_LANE = 0
LINK_SUFFIX = "-plans"  # of sockets, see `message_link`


def remove_stale_regions() -> list[str]:
    """Removes regions and sockets whose creator is dead and returns their names."""
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
    for path in SHM_DIR.glob(f"{NAME_PREFIX}*{LINK_SUFFIX}"):  # they have no lock, but exist beside a region only
        if not path.with_name(f"{path.name.removesuffix(LINK_SUFFIX)}-{FIRST_LANE}").exists():
            with contextlib.suppress(OSError):  # another user's, or just removed
                path.unlink()
                removed.append(path.name)
    return removed
