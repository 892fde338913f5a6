"""Writes files that are complete or absent, whatever interrupts the writing."""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path

from services.common.errors import CapacityError, ConfigError

TEMPORARY_SUFFIX = ".partial"


def write_atomically(path: Path, data: bytes) -> None:
    """Writes `data` to a temporary file and then replaces `path` by it.

    Raises CapacityError if the disk is full, ConfigError if `path` cannot be written. Only a killed process leaves
    something behind: a file that ends in TEMPORARY_SUFFIX.
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
    """Creates `path` and its parents if they are missing. Raises ConfigError if it cannot."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"directory {path} cannot be made: {error.strerror}") from error
