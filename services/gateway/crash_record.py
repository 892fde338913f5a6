"""`CrashRecord`: which request kills the workers, so that it is failed alone and the others go on.

A worker's death proves nothing against the sequences that it was running, for most deaths are nobody's fault.
So after a first crash all of them go on together. A token clears a sequence. Those that see a second crash
without one are suspects, and the dense worker runs suspects one at a time: the next crash names the culprit.
A sequence that was alone in two crashes in a row needs no third.

Only sequences that a worker had admitted count, not those in its queue; and only crashes do, not a stream that
broke while the worker lived on, nor an end that a worker announced. Runs in the gateway's event loop.
"""

from __future__ import annotations

from collections.abc import Iterable

import structlog

from services.common.errors import RequestAborted
from services.gateway.journal import Journal, JournalEntry

log = structlog.get_logger()

MAX_CRASHES_TOGETHER = 2  # from then on the dense worker runs it alone; see its `Sequence.is_suspect`


class CrashRecord:
    """Told by the `DenseClient` what happens to its streams."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._epoch: int | None = None  # of the dense worker of the last stream
        self._is_crash: bool | None = None  # what the last stream's farewell said, if there was one

    def admitted(self, seq_ids: Iterable[int]) -> None:
        """The dense worker may run these from now on."""
        for seq_id in seq_ids:
            entry = self._journal.get(seq_id)
            if entry is not None:
                entry.is_admitted = True

    def farewell(self, is_crash: bool) -> None:
        """The dense worker ends the stream itself."""
        self._is_crash = is_crash

    def connected(self, epoch: int) -> None:
        """There is a dense worker again: only now it is known whether the last one died."""
        is_crash = self._epoch not in (None, epoch) if self._is_crash is None else self._is_crash
        present = [entry for entry in self._journal.unfinished() if entry.is_admitted]
        for entry in present:
            entry.is_admitted = False
        self._epoch, self._is_crash = epoch, None
        if is_crash:
            self._count_crash(present)

    def left(self) -> None:
        """The sequences go on with another worker at once. Why this stream ended, if not by a farewell, stays unknown:
        it is taken for a crash, or a request could kill one worker after the other.
        """
        is_crash = self._is_crash is not False
        present = [entry for entry in self._journal.unfinished() if entry.is_admitted]
        for entry in present:
            entry.is_admitted = False
        self._epoch = self._is_crash = None
        if is_crash and present:
            self._count_crash(present)

    def _count_crash(self, present: list[JournalEntry]) -> None:
        log.warning("a worker crashed", running=len(present))
        for entry in present:
            entry.num_crashes += 1
            is_alone = len(present) == 1 or entry.num_crashes > MAX_CRASHES_TOGETHER
            if is_alone and entry.num_crashes >= MAX_CRASHES_TOGETHER:
                log.error("request given up", request_id=entry.request.request_id, num_crashes=entry.num_crashes)
                entry.fail(
                    RequestAborted(
                        f"request {entry.request.request_id!r} was running in {entry.num_crashes} crashes of a worker "
                        "in a row, alone in the last one; it is not tried again"
                    )
                )
