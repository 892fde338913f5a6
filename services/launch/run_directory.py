"""The launcher's directories for sockets, files and memory, and the removal of those that killed launchers left.

A living launcher holds a lock (flock) on a file in its directory; the kernel releases it when the process ends, however
it ends. Whoever gets the lock may remove the directory. A launcher that has just made its directory may lose this race
and then makes another one.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from services.channel.region import SHM_DIR

NAME_PREFIX = "twostroke-run-"
HIDDEN_PREFIX = f".{NAME_PREFIX}"  # in shared memory, where the names of the workers' regions begin alike
LOCK_NAME = "lock"
MAX_ATTEMPTS = 100  # to make a directory that no launcher takes for a dead one's; each start elsewhere removes one


@contextlib.contextmanager
def run_directory(parent: Path | None = None) -> Iterator[Path]:
    """A new directory, locked while its launcher lives and removed at the end.

    parent: `SHM_DIR`, for files in shared memory; None: the directory for temporary files.
    """
    remove_stale_directories()
    path, lock = _make_locked(_temporary() / NAME_PREFIX if parent is None else parent / HIDDEN_PREFIX)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)  # another launcher may look for its lock now, and then removes the rest
        os.close(lock)


def live_directories() -> list[Path]:
    """The directories of this user's running launchers."""
    live = []
    for path in _directories(_temporary() / NAME_PREFIX):
        try:
            with (path / LOCK_NAME).open("rb") as lock:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            live.append(path)
        except OSError:
            continue  # just made or removed
    return live


def remove_stale_directories() -> list[str]:
    """Removes this user's directories whose launcher is dead and returns their names."""
    removed = []
    for path in [*_directories(_temporary() / NAME_PREFIX), *_directories(SHM_DIR / HIDDEN_PREFIX)]:
        with contextlib.suppress(OSError):  # its launcher lives, or another one has just removed it
            lock = _open_lock(path)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)  # another launcher, or an ending service, may remove it too
                removed.append(path.name)
            finally:
                os.close(lock)
    return removed


def _make_locked(prefix: Path) -> tuple[Path, int]:
    """A new directory, and the open file whose lock this process holds."""
    for _ in range(MAX_ATTEMPTS):
        path = Path(tempfile.mkdtemp(prefix=prefix.name, dir=prefix.parent))
        with contextlib.suppress(FileNotFoundError):  # another launcher has removed it already
            lock = _open_lock(path)
            with contextlib.suppress(BlockingIOError):  # another launcher is removing it
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(lock).st_nlink:
                    return path, lock
            os.close(lock)
    raise OSError(f"{MAX_ATTEMPTS} new directories {prefix}* were removed at once")


def _open_lock(directory: Path) -> int:
    """Opens the file to lock. A launcher that was killed at its start, or while it removed its directory, left none."""
    return os.open(directory / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)


def _temporary() -> Path:
    return Path(tempfile.gettempdir())


def _directories(prefix: Path) -> list[Path]:
    """This user's directories, of living and dead launchers."""
    found = []
    for path in prefix.parent.glob(f"{prefix.name}*"):
        with contextlib.suppress(OSError):
            if path.lstat().st_uid == os.geteuid() and path.is_dir() and not path.is_symlink():
                found.append(path)
    return found
