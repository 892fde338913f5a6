"""Structured logs on standard error: one line an event, by structlog: key=value, JSON, or short lines at a terminal.

Logging never fails. A line that cannot be written, because the pipe has no reader or the disk is full, is dropped and
counted. The first line after that carries the count as `num_dropped_lines`.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import sys
import threading
from pathlib import Path

from services.common.config import LogSection
from services.common.process import hiding
from services.common.terminal import columns_of, terminal_line

with hiding("rich"):  # a hundred modules, for tracebacks that look different from ours
    import structlog
    from structlog.typing import EventDict, WrappedLogger


def configure_logs(section: LogSection, service: str, error_file: Path | None = None) -> None:
    """Sets up this process's logs; every line carries `service`. `error_file` keeps the last error.

    Events of loggers with `log="access"` are dropped, unless `section` wants them.
    """
    file = sys.stderr.fileno()
    renderers = {
        "text": lambda logger, method, event: terminal_line(event, columns_of(file)),
        "logfmt": structlog.processors.LogfmtRenderer(key_order=["timestamp", "level", "service", "event"]),
        "json": structlog.processors.JSONRenderer(),
    }
    automatic = "text" if sys.stderr.isatty() else "logfmt"
    has_access_log = section.access or section.level == "debug"
    lines = LogLines(file)
    structlog.configure(
        processors=[
            *([] if has_access_log else [_drop_access_lines]),
            lambda logger, method, event: {"service": service, **event},
            structlog.processors.add_log_level,
            *([] if error_file is None else [functools.partial(_keep_error, error_file)]),
            lines.add_num_dropped,
            structlog.processors.TimeStamper(fmt="iso"),
            structlog.processors.format_exc_info,
            renderers[automatic if section.format == "auto" else section.format],
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[section.level.upper()]),
        logger_factory=lambda *_: lines,
    )


def print_to_stderr(text: str) -> None:
    """Writes a text to standard error, for the person who started this process; ignores a closed stream."""
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)


class LogLines:
    """A logger for structlog that writes each rendered event as a line; from any thread."""

    def __init__(self, file: int) -> None:
        """`file` is a file descriptor."""
        self._writer = LineWriter(file)
        self._lock = threading.Lock()
        self._is_told = True  # whether the log shows all dropped lines
        self.num_dropped = 0  # lines since the start of the process

    def add_num_dropped(self, logger: WrappedLogger, method: str, event: EventDict) -> EventDict:
        """A structlog processor: adds the count of dropped lines to the first event after a dropped one."""
        return event if self._is_told else {**event, "num_dropped_lines": self.num_dropped}

    def msg(self, line: str) -> None:
        """Writes a line; counts it as dropped if that fails."""
        with self._lock:
            try:
                self._writer.write(line)
                self._is_told = True
            except OSError:
                self.num_dropped += 1
                self._is_told = False

    debug = info = warning = error = critical = log = msg  # the names by which structlog calls it


def _drop_access_lines(logger: WrappedLogger, method: str, event: EventDict) -> EventDict:
    if event.get("log") == "access":
        raise structlog.DropEvent
    return event


def _keep_error(file: Path, logger: WrappedLogger, method: str, event: EventDict) -> EventDict:
    if event["level"] in ("error", "critical"):
        cause = event.get("exc_info") or event.get("error", "")
        detail = f"{type(cause).__name__}: {cause}" if isinstance(cause, BaseException) else str(cause)
        with contextlib.suppress(OSError):
            file.write_text(f"{event['event']}: {detail}".rstrip(": "))
    return event


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
