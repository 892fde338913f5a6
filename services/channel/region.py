"""`SharedRegion`: a named piece of POSIX shared memory whose owner's death can be noticed.

The creator holds an exclusive `flock` on the file for life, so that whoever starts next can tell a living
region from one that a killed process left behind, and remove it.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
from pathlib import Path
from typing import Self

from services.channel.shm_cleanup import NAME_PREFIX, SHM_DIR
from services.common.errors import CapacityError, PeerError, StaleEpoch

HEADER_BYTES = 4096
# The header is 64-bit words. Those that different processes write stand on cache lines of their own.
WORD_BYTES = 8
WORDS_PER_LINE = 8
ABORT_WORD = WORDS_PER_LINE  # not 0 after an abort
_EPOCH, _ATTACHMENT = 0, 1
_FIRST_FLAG = 2 * WORDS_PER_LINE
_NUM_ERRORS = 5 * WORDS_PER_LINE  # beyond the three flags


class SharedRegion:
    """Header (epoch, attachment, abort mark, flags) and whatever follows it, `num_bytes` in all."""

    def __init__(self, path: Path, file: int, num_bytes: int, *, is_owner: bool) -> None:
        self._path = path
        self._file = file
        self._is_owner = is_owner
        self.memory = mmap.mmap(file, num_bytes)
        self.words = memoryview(self.memory)[:HEADER_BYTES].cast("Q")

    @classmethod
    def create(cls, num_bytes: int, epoch: int, attachment_id: int, lane: int) -> Self:
        """Allocates a zeroed region; raises `CapacityError` when shared memory cannot hold it."""
        path = SHM_DIR / f"{NAME_PREFIX}{epoch:016x}-{attachment_id}-{lane}"
        # Nobody looks for the hidden name, so that the region is locked before it can be found.
        hidden = path.with_name(f".{path.name}")
        file = os.open(hidden, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            os.posix_fallocate(file, 0, num_bytes)
            hidden.rename(path)
        except OSError as error:
            os.close(file)
            hidden.unlink()
            space = os.statvfs(SHM_DIR)
            raise CapacityError(
                f"data region needs {num_bytes} bytes of shared memory, "
                f"{SHM_DIR} has {space.f_bavail * space.f_frsize} free ({error.strerror})"
            ) from error
        region = cls(path, file, num_bytes, is_owner=True)
        region.words[_EPOCH] = epoch
        region.words[_ATTACHMENT] = attachment_id
        return region

    @classmethod
    def open(cls, name: str, num_bytes: int, epoch: int, attachment_id: int) -> Self:
        """Maps the peer's region; raises `StaleEpoch` when it is not the one that was announced."""
        path = SHM_DIR / name
        try:
            file = os.open(path, os.O_RDWR)
        except FileNotFoundError as error:
            raise StaleEpoch(f"shared-memory region {path} of epoch {epoch:016x} does not exist") from error
        found_bytes = os.fstat(file).st_size
        if found_bytes != num_bytes:
            os.close(file)
            raise PeerError(f"shared-memory region {path} has {found_bytes} bytes, {num_bytes} expected")
        region = cls(path, file, num_bytes, is_owner=False)
        found = (region.words[_EPOCH], region.words[_ATTACHMENT])
        if found != (epoch, attachment_id):
            region.close()
            raise StaleEpoch(
                f"region {path} is of epoch {found[0]:016x}, attachment {found[1]}; "
                f"expected epoch {epoch:016x}, attachment {attachment_id}"
            )
        return region

    @property
    def name(self) -> str:
        """What the peer passes to `open`."""
        return self._path.name

    @property
    def is_aborted(self) -> bool:
        """A closed region counts as aborted: whoever asks still is too late."""
        try:
            return bool(self.words[ABORT_WORD])
        except ValueError:  # released
            return True

    def add_errors(self, count: int) -> None:
        """See `Channel.add_errors`; there is one writer."""
        self.words[_NUM_ERRORS] += count

    @property
    def num_errors(self) -> int:
        return self.words[_NUM_ERRORS]

    def abort(self) -> None:
        """Sets the abort mark, which is never cleared: the next attachment gets a new region.

        Called from other threads than `close`, and perhaps after it: then nobody waits any more.
        """
        with contextlib.suppress(ValueError):  # released
            self.words[ABORT_WORD] = 1

    def close(self) -> None:
        """Unmaps the memory, at once and not when the last exception that saw it is forgotten; the owner removes it.

        Tensors over it must not be used afterwards.
        """
        self.words.release()
        if self._is_owner:
            self._path.unlink(missing_ok=True)
        os.close(self._file)
        with contextlib.suppress(BufferError):  # somebody has a tensor over it still: it goes with that
            self.memory.close()


def flag_word(flag: int) -> int:
    """Index in `words` of a flag, alone on its cache line."""
    return _FIRST_FLAG + flag * WORDS_PER_LINE
