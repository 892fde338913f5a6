"""`LineWriter`: whole lines to a file that may be full, or a pipe that may have no reader."""

from __future__ import annotations

import os


class LineWriter:
    """Has no buffer: what a buffer could not write would come later, in pieces. For one thread at a time."""

    def __init__(self, file: int) -> None:
        """`file` is a descriptor, which somebody else closes."""
        self._file = file
        self._is_torn = False  # the last line was written in part

    def write(self, line: str) -> None:
        """Raises `OSError` when the line cannot be written, or only a part of it: then the next one starts anew."""
        unwritten = ("\n" * self._is_torn + line + "\n").encode(errors="backslashreplace")
        while unwritten:
            num_bytes = os.write(self._file, unwritten)
            self._is_torn = True
            unwritten = unwritten[num_bytes:]
        self._is_torn = False
