"""`StepLog`: writes one JSON line for every step.

The engine thread only puts a step's figures into a bounded queue; a separate thread writes them. If the disk is too
slow or full, lines are dropped, and the next line has their number.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import structlog

from services.common.errors import ConfigError
from services.common.logs import LineWriter
from services.dense_worker.engine.observer import StepStats
from services.dense_worker.engine.sequence import Sequence, SequenceOutput

log = structlog.get_logger()

MAX_NUM_PENDING = 10_000  # lines not written yet
STOP_TIMEOUT_S = 2.0


class StepLog:
    """An `EngineObserver`; see `writing_step_log`."""

    def __init__(self, write: Callable[[str], None], max_num_pending: int = MAX_NUM_PENDING) -> None:
        """`write` writes a line; see `LineWriter`."""
        self._write_line = write
        self._pending: queue.Queue[tuple[float, StepStats, int] | None] = queue.Queue(max_num_pending)
        self._num_dropped = 0  # since the last line that fitted into the queue
        self._has_failed = False  # whether a write has failed; logged only once
        self._thread = threading.Thread(target=self._write, name="step-log", daemon=True)

    def start(self) -> None:
        """Starts the thread that writes."""
        self._thread.start()

    def stop(self) -> bool:
        """Writes the remaining lines, for at most `STOP_TIMEOUT_S`. Returns whether the thread has ended."""
        with contextlib.suppress(queue.Full):
            self._pending.put(None, timeout=STOP_TIMEOUT_S)
        self._thread.join(STOP_TIMEOUT_S)
        return not self._thread.is_alive()

    def on_step(self, stats: StepStats, started: Iterable[Sequence], outputs: Iterable[SequenceOutput]) -> None:
        """Queues the step's figures; counts them as dropped if the queue is full."""
        try:
            self._pending.put_nowait((time.time(), stats, self._num_dropped))
            self._num_dropped = 0
        except queue.Full:
            self._num_dropped += 1

    def on_handoff_abort(self) -> None:
        """Writes nothing: the log shows it as a gap in the step numbers."""

    def _write(self) -> None:
        num_lost = 0  # since the last line that was written
        while (item := self._pending.get()) is not None:
            timestamp, stats, num_dropped = item
            num_lost += num_dropped
            try:
                self._write_line(json.dumps(line_of(timestamp, stats, num_lost)))
                num_lost = 0
            except OSError as error:  # a full disk must not stop the engine
                if not self._has_failed:
                    log.error("lines of the step log are dropped", error=error.strerror)
                self._has_failed = True
                num_lost += 1


@contextlib.contextmanager
def writing_step_log(path: Path | None) -> Iterator[list[StepLog]]:
    """A step log that appends to `path` as long as the context lasts; none without a path.

    Raises `ConfigError` when the file cannot be written.
    """
    if path is None:
        yield []
        return
    try:
        file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    except OSError as error:
        raise ConfigError(f"dense.step_log {str(path)!r} cannot be written: {error.strerror}") from error
    step_log = StepLog(LineWriter(file).write)
    step_log.start()
    try:
        yield [step_log]
    finally:
        if step_log.stop():
            with contextlib.suppress(OSError):  # a full disk may report its error only now
                os.close(file)


def line_of(timestamp: float, stats: StepStats, num_dropped: int) -> dict[str, Any]:
    """The step as JSON: counts, times in milliseconds, `timestamp` in seconds since 1970."""
    line = {
        "timestamp": round(timestamp, 6),
        "step_id": stats.step_id,
        "lane": stats.lane,
        "num_seqs": stats.num_seqs,
        "num_tokens": stats.num_tokens,
        "num_sampled": stats.num_sampled,
        "num_running": stats.num_running,
        "num_waiting": stats.num_waiting,
        "num_preemptions": stats.num_preemptions,
        "num_blocks": stats.num_blocks,
        "num_free_blocks": stats.num_free_blocks,
        "num_reserved_blocks": stats.num_reserved_blocks,
        "gap_ms": round(1e3 * stats.gap_s, 3),
        "launch_ms": round(1e3 * stats.launch_s, 3),
        "duration_ms": round(1e3 * stats.duration_s, 3),
    }
    if stats.wait_s is not None:
        line["wait_ms"] = round(1e3 * stats.wait_s, 3)
    if stats.follow_up_s:
        line["draft_ms"] = round(1e3 * stats.follow_up_s, 3)
    if num_dropped:
        line["num_dropped_lines"] = num_dropped
    return line
