"""A pseudo-terminal for processes under test, and what a person would see on it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import struct
import termios
import threading
from collections.abc import Iterator


class Terminal:
    """The near end of a pseudo-terminal; a thread reads all that processes write to `file`, its far end."""

    def __init__(self, num_columns: int) -> None:
        self._near, self.file = os.openpty()
        fcntl.ioctl(self.file, termios.TIOCSWINSZ, struct.pack("HHHH", 50, num_columns, 0, 0))
        self._written = bytearray()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def lines(self) -> list[str]:
        """The lines on an endless screen, without colours and trailing spaces."""
        return screen_lines(bytes(self._written).decode(errors="replace"))

    def close(self) -> None:
        """Closes both ends, after all processes that write to it have ended."""
        os.close(self.file)
        self._reader.join(timeout=10.0)
        os.close(self._near)

    def _read(self) -> None:
        with contextlib.suppress(OSError):  # EIO: nobody has the far end open any more
            while piece := os.read(self._near, 1 << 16):
                self._written += piece


def screen_lines(written: str) -> list[str]:
    """What a terminal shows of text with carriage returns, colours, and erasures up to the end of a line."""
    lines = []
    for line in written.split("\n"):
        cells: list[str] = []
        column = 0
        for token in re.findall(r"\x1b\[[0-9;]*[a-zA-Z]|.", line, re.DOTALL):
            if token == "\r":
                column = 0
            elif token == "\x1b[K":
                del cells[column:]
            elif len(token) == 1:
                cells[column : column + 1] = [token]
                column += 1
        lines.append("".join(cells).rstrip())
    return lines


@contextlib.contextmanager
def terminal(num_columns: int = 100) -> Iterator[Terminal]:
    """A terminal that is closed at the end."""
    opened = Terminal(num_columns)
    try:
        yield opened
    finally:
        opened.close()
