"""`LineWriter`: writes whole lines to a file whose disk may be full, or to a pipe that may have no reader."""

from __future__ import annotations

import os


class LineWriter:
    """Writes without a buffer, because the rest of a failed line must not follow later. For one thread at a time."""

    def __init__(self, file: int) -> None:
        """`file` is a file descriptor; the caller closes it."""
        self._file = file
        self._is_torn = False  # whether the last line was written only in part

    def write(self, line: str) -> None:
        """Writes a line. Raises `OSError` if that fails; after a partial write the next call starts a new line."""
        unwritten = ("\n" * self._is_torn + line + "\n").encode(errors="backslashreplace")
        while unwritten:
            num_bytes = os.write(self._file, unwritten)
            self._is_torn = True
            unwritten = unwritten[num_bytes:]
        self._is_torn = False
