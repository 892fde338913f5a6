"""Processes that keep what clients send from the gateway: they read standard input, and answer at standard output.

Their own limits of time and memory end them by signals, whatever it is that they were given.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import structlog

log = structlog.get_logger()

# Signals from outside, at any moment; the limits end a process by others. The kernel sends SIGKILL if the machine has
# no memory left.
KILLED_BY = (-signal.SIGKILL, -signal.SIGTERM, -signal.SIGHUP)
_ROOT = Path(__file__).parents[3]


class KilledError(Exception):
    """The process was killed from outside, and nothing that it was given is to blame."""


def start_process(module: str, *arguments: str, env: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
    """Starts `python -m module`. `env`: its environment; None: the gateway's."""
    # Not by asyncio: uvloop runs Python in the child between fork and exec, where it crashes now and then.
    command = [sys.executable, "-m", module, *arguments]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=_ROOT, env=env)


def close_process(process: subprocess.Popen[bytes]) -> int:
    """Closes the pipes of a process that ends; returns its exit status when it has ended."""
    assert process.stdin is not None and process.stdout is not None, "they are pipes"
    with contextlib.suppress(BrokenPipeError):  # what was to be written has been written in part
        process.stdin.close()
    process.stdout.close()
    return process.wait()


def write_and_read(process: subprocess.Popen[bytes], message: bytes, most: int) -> bytes:
    """Writes a message and reads a line of at most so many bytes. It has no end if the process has ended."""
    assert process.stdin is not None and process.stdout is not None, "they are pipes"
    with contextlib.suppress(BrokenPipeError):  # then there is no answer either
        process.stdin.write(message)
        process.stdin.flush()
    return process.stdout.readline(most)


def end_of(process: subprocess.Popen[bytes], task: str) -> int:
    """The exit status of a process that has ended in its `task`. Raises `KilledError` if that was done from outside."""
    status = close_process(process)
    log.warning(f"the process that {task} has ended", status=status)
    if status in KILLED_BY:
        raise KilledError
    return status
