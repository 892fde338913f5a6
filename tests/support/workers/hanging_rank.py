"""A dense shard whose device hangs: its process answers, and the work that it was given never ends.

As on a GPU, the engine thread only hands steps over, and whoever closes the seam waits for them. When the file
HANG_FILE exists, the next step removes it and never ends.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from services.channel.shm import ShmChannel
from services.common.errors import TwostrokeError
from services.dense_worker.ranks.__main__ import main
from services.dense_worker.ranks.shard_runner import ShardRunner
from services.step import StepPlan

HANG_FILE = "HANG_FILE"  # the environment variable with the file's name

stream = ThreadPoolExecutor(1)
run_step, compute_rows, close = ShardRunner.run_step, ShardRunner.compute_rows, ShmChannel.close


def enqueue(work: Callable[..., None], *arguments: object) -> None:
    def run() -> None:
        with contextlib.suppress(TwostrokeError):  # of a step that was aborted, whose end nobody looks at
            work(*arguments)

    stream.submit(run)


def enqueue_step(runner: ShardRunner, plan: StepPlan, *arguments: object) -> None:
    file = Path(os.environ[HANG_FILE])
    if file.exists():
        file.unlink()
        stream.submit(threading.Event().wait)
    enqueue(run_step, runner, plan, *arguments)


def close_after_all_steps(channel: ShmChannel) -> None:
    stream.submit(int).result()
    close(channel)


if __name__ == "__main__":
    ShardRunner.run_step = enqueue_step  # type: ignore[method-assign]
    ShardRunner.compute_rows = lambda *arguments: enqueue(compute_rows, *arguments)  # type: ignore[method-assign]
    ShmChannel.close = close_after_all_steps  # type: ignore[method-assign]
    main()
