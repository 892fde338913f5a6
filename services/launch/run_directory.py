"""The launcher's directory for sockets and files, and the removal of directories that killed launchers left."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

NAME_PREFIX = "twostroke-"
LOCK_NAME = "lock"


@contextlib.contextmanager
def run_directory() -> Iterator[Path]:
    """A new directory, locked while its launcher lives and removed at the end."""
    remove_stale_directories()
    path = Path(tempfile.mkdtemp(prefix=NAME_PREFIX))
    with (path / "new-lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        Path(lock.name).rename(path / LOCK_NAME)  # only now: an unlocked directory means a dead launcher to others
        try:
            yield path
        finally:
            shutil.rmtree(path)


def live_directories() -> list[Path]:
    """The directories of this user's running launchers."""
    live = []
    for path in Path(tempfile.gettempdir()).glob(f"{NAME_PREFIX}*/{LOCK_NAME}"):
        try:
            with path.open("rb") as lock:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            live.append(path.parent)
        except OSError:
            continue  # another user's, or just removed
    return live


def remove_stale_directories() -> list[str]:
    """Removes directories whose launcher is dead and returns their names."""
    removed = []
    for path in Path(tempfile.gettempdir()).glob(f"{NAME_PREFIX}*/{LOCK_NAME}"):
        try:
            file = os.open(path, os.O_RDWR)
        except OSError:
            continue  # another user's, or just removed
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path.parent, ignore_errors=True)  # another launcher, or an ending service, may remove it too
            removed.append(path.parent.name)
        except BlockingIOError:
            pass  # its launcher lives
        finally:
            os.close(file)
    return removed
