"""What a person sees at a terminal: short log lines, progress bars, and text of others without its control characters.

Several processes write to one terminal. A bar stays on the cursor's line until its next update; a log line first erases
that line, so the bar moves below it.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from typing import Any, TextIO

# C0 but for tab and newline, DEL, C1, and what turns the direction of writing; U+2028 and U+2029 end lines.
TERMINAL_CONTROLS = {*range(0x20), *range(0x7F, 0xA0), *range(0x2028, 0x202F), *range(0x2066, 0x206A)} - {0x09, 0x0A}
VISIBLE_CONTROLS = {code: ascii(chr(code))[1:-1] for code in TERMINAL_CONTROLS}
ERASE_LINE = "\r\x1b[K"
COLOURS = {"warning": "\x1b[33m", "error": "\x1b[31m", "critical": "\x1b[31m"}
DEFAULT_COLOUR = "\x1b[m"


def safe_for(stream: TextIO, text: str) -> str:
    """The text; for a terminal its control characters are made visible."""
    return text.translate(VISIBLE_CONTROLS) if stream.isatty() else text


def terminal_line(event: Mapping[str, Any], num_columns: int) -> str:
    """A log event for a person: local time, service, event, and its values.

    Warnings and errors are coloured, and end with the traceback or the stacks if there are any. Other events are cut to
    `num_columns`.
    """
    values = dict(event)
    level, service, name = (values.pop(key) for key in ("level", "service", "event"))
    traceback = values.pop("exception", values.pop("stack", None))
    time = datetime.fromisoformat(values.pop("timestamp")).astimezone().strftime("%H:%M:%S")
    text = " ".join([f"{time} {service:12}", str(name), *(f"{key}={value}" for key, value in values.items())])
    line = text.replace("\n", " ").translate(VISIBLE_CONTROLS)
    if level not in COLOURS:
        return ERASE_LINE + (line if len(line) <= num_columns else line[: num_columns - 1] + "…")
    details = "" if traceback is None else f"\n{traceback.translate(VISIBLE_CONTROLS)}"
    return f"{ERASE_LINE}{COLOURS[level]}{line}{DEFAULT_COLOUR}{details}"


def columns_of(file: int) -> int:
    """The width of a terminal, which the person may change at any time; 80 if it has none."""
    with contextlib.suppress(OSError):
        return os.get_terminal_size(file).columns or 80
    return 80


@contextlib.contextmanager
def progress_bar(what: str, total: int, unit: str = "B") -> Iterator[Callable[[int], object]]:
    """Shows a bar on standard error if that is a terminal, else nothing. Yields what is called with what is done more.

    "B" are bytes: a bar of them shows GB and GB/s. Other units are counted, and their bar goes when it is complete. All
    show the time that is left, by the rate so far. With a `total` of 0 there is no bar.
    """
    if not total or not sys.stderr.isatty():
        yield lambda done: None
        return
    from tqdm import tqdm  # only here: no pipe shows a bar

    is_bytes = unit == "B"
    done = "{n_fmt}B/{total_fmt}B" if is_bytes else "{n_fmt}/{total_fmt}"
    shape = "{desc}: {percentage:3.0f}%|{bar}| " + done + " [{elapsed}<{remaining}, {rate_fmt}]"
    with tqdm(
        desc=what, total=total, unit=unit, unit_scale=is_bytes, leave=is_bytes, bar_format=shape, dynamic_ncols=True
    ) as bar:
        yield bar.update
