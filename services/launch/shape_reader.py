"""`reading_shape`: while the launcher starts its services, another process reads the model's shape for all workers.

`python -m services.launch.shape_reader DIR NUM_LAYERS FILE PID` is this process. FILE is the number of an open file,
which is locked until the process ends: see `services/common/ready_shape.py`. PID is the launcher's.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from services.common.errors import ModelError
from services.common.process import die_with_parent, end_at_signals, importing

if TYPE_CHECKING:
    from services.common.config import ModelSection

log = structlog.get_logger()

MAX_READING_S = 40.0  # a start on a busy machine takes ten


@contextlib.contextmanager
def reading_shape(section: ModelSection, path: Path, start: Callable[..., subprocess.Popen[bytes]]) -> Iterator[None]:
    """Starts the process, by `start_process`. It ends by itself, or at the end of the context."""
    with path.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # the process keeps it
        arguments = map(str, (section.path, section.num_layers or 0, file.fileno(), os.getpid()))
        process = start("services.launch.shape_reader", [*arguments], files=[file.fileno()])
    waiter = threading.Thread(target=_wait, args=(process,), name="shape-reader")
    waiter.start()
    try:
        yield
    finally:
        process.kill()
        waiter.join()


def _wait(process: subprocess.Popen[bytes]) -> None:
    """Takes its status, and ends a process that hangs: each worker that starts would wait for it."""
    try:
        process.wait(MAX_READING_S)
    except subprocess.TimeoutExpired:
        log.warning("the process that reads the model's shape hangs: the workers read it", seconds=MAX_READING_S)
        process.kill()
        process.wait()


def main() -> None:
    """Ends with status 1 if there is no shape: the workers, which then read config.json, say why."""
    end_at_signals()
    path, num_layers, file, launcher_pid = sys.argv[1:]
    die_with_parent(int(launcher_pid))
    with importing():
        from services.common.ready_shape import write_shape
    try:
        with open(int(file), "wb") as stream:
            write_shape(stream, Path(path), int(num_layers) or None)
    except ModelError:
        os._exit(1)
    os._exit(0)  # a regular exit would unload all modules first


if __name__ == "__main__":
    main()
