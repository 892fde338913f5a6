"""`StepLog`: one JSON line for every step, for those who want to see each of them.

The engine thread only puts a step's figures into a bounded queue; a thread of its own writes them. When the disk
cannot keep up, lines are dropped and the next one says how many.
"""

from __future__ import annotations

import contextlib
import json
import queue
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

import structlog

from services.common.errors import ConfigError
from services.dense_worker.observer import StepStats
from services.dense_worker.sequence import Sequence, SequenceOutput

log = structlog.get_logger()

MAX_NUM_PENDING = 10_000  # lines not written yet
STOP_TIMEOUT_S = 2.0


class StepLog:
    """An `EngineObserver`; see `writing_step_log`."""

    def __init__(self, file: IO[str], max_num_pending: int = MAX_NUM_PENDING) -> None:
        self._file = file
        self._pending: queue.Queue[tuple[float, StepStats, int] | None] = queue.Queue(max_num_pending)
        self._num_dropped = 0  # since the last line that found room
        self._thread = threading.Thread(target=self._write, name="step-log", daemon=True)

    def start(self) -> None:
        """Starts the thread that writes."""
        self._thread.start()

    def stop(self) -> None:
        """Writes what is left, for `STOP_TIMEOUT_S` at most."""
        with contextlib.suppress(queue.Full):
            self._pending.put(None, timeout=STOP_TIMEOUT_S)
        self._thread.join(STOP_TIMEOUT_S)

    def on_step(self, stats: StepStats, started: Iterable[Sequence], outputs: Iterable[SequenceOutput]) -> None:
        """See `EngineObserver`."""
        try:
            self._pending.put_nowait((time.time(), stats, self._num_dropped))
            self._num_dropped = 0
        except queue.Full:
            self._num_dropped += 1

    def on_handoff_abort(self) -> None:
        """See `EngineObserver`. The gap in the step numbers tells it."""

    def _write(self) -> None:
        try:
            while (item := self._pending.get()) is not None:
                self._file.write(json.dumps(line_of(*item)) + "\n")
                if self._pending.empty():
                    self._file.flush()
            self._file.flush()
        except OSError as error:  # a full disk must not stop the engine
            log.error("the step log ends here", path=self._file.name, error=error.strerror)


@contextlib.contextmanager
def writing_step_log(path: Path | None) -> Iterator[list[StepLog]]:
    """A step log that appends to `path` as long as the context lasts; none without a path.

    Raises `ConfigError` when the file cannot be written.
    """
    if path is None:
        yield []
        return
    try:
        file = path.open("a")
    except OSError as error:
        raise ConfigError(f"dense.step_log {str(path)!r} cannot be written: {error.strerror}") from error
    with file:
        step_log = StepLog(file)
        step_log.start()
        try:
            yield [step_log]
        finally:
            step_log.stop()


def line_of(timestamp: float, stats: StepStats, num_dropped: int) -> dict[str, Any]:
    """The step as JSON: counts as they are, times in milliseconds, `timestamp` in seconds since 1970."""
    line = {
        "timestamp": round(timestamp, 6),
        "step_id": stats.step_id,
        "num_seqs": stats.num_seqs,
        "num_tokens": stats.num_tokens,
        "num_sampled": stats.num_sampled,
        "num_running": stats.num_running,
        "num_waiting": stats.num_waiting,
        "num_preemptions": stats.num_preemptions,
        "num_blocks": stats.num_blocks,
        "num_free_blocks": stats.num_free_blocks,
        "num_reserved_blocks": stats.num_reserved_blocks,
        "launch_ms": round(1e3 * stats.launch_s, 3),
        "duration_ms": round(1e3 * stats.duration_s, 3),
    }
    if stats.wait_s is not None:
        line["wait_ms"] = round(1e3 * stats.wait_s, 3)
    if num_dropped:
        line["num_dropped_lines"] = num_dropped
    return line
