"""Files that are there whole or not at all, whatever interrupts their writing."""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path

from services.common.errors import CapacityError, ConfigError

TEMPORARY_SUFFIX = ".partial"


def write_atomically(path: Path, data: bytes) -> None:
    """Puts `data` at `path`, replacing what is there, once all of it is on the disk.

    Raises CapacityError where the disk is full, ConfigError where `path` cannot be written. Nothing
    remains of a failed attempt but, after a kill, a file that ends in TEMPORARY_SUFFIX.
    """
    temporary = None
    try:
        descriptor, name = tempfile.mkstemp(TEMPORARY_SUFFIX, f".{path.name}.", path.parent)
        temporary = Path(name)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.chmod(0o644)
        temporary.replace(path)
        temporary = None
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise CapacityError(f"{path.parent} has no space for {path.name}, {len(data)} bytes") from error
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from error
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)


def make_directory(path: Path) -> None:
    """Makes `path` and its parents where missing. Raises ConfigError where that cannot be."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"directory {path} cannot be made: {error.strerror}") from error
