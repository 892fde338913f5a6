"""`CrashRecord`: which request kills the workers, so that it is failed alone and the others go on.

A worker's death proves nothing against the sequences that it was running, for most deaths are nobody's fault.
So after a first crash all of them go on together. A token clears a sequence. Those that see a second crash
without one are suspects, and the dense worker runs suspects one at a time: the next crash names the culprit.
A sequence that was alone in two crashes in a row needs no third.

Only crashes count, not a stream that broke while the worker lived on, nor an end that a worker announced; and they
count only for sequences of which a step was under way. After an attention worker died its dense worker tells which
these are, and where in their texts they were: what has been computed before without harm, and is only computed again,
did not cause a crash. A dense worker that died cannot tell, so all that it had admitted count, not those in its queue.
Runs in the gateway's event loop.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import structlog

from services.common.errors import RequestAborted
from services.gateway.link.journal_entry import JournalEntry
from services.gateway.link.stream_sequences import StreamSequences
from services.pb import dense_pb2

log = structlog.get_logger()

MAX_CRASHES_TOGETHER = 2  # from then on the dense worker runs it alone; see its `Sequence.is_suspect`


class CrashRecord:
    """Told by the `DenseClient` what happens to its streams."""

    def __init__(self, sequences: StreamSequences) -> None:
        self._sequences = sequences
        self._epoch: int | None = None  # of the dense worker of the last stream
        self._farewell: dense_pb2.Farewell | None = None  # of the last stream, if there was one

    def admitted(self, seq_ids: Iterable[int]) -> None:
        """The dense worker may run these from now on."""
        for seq_id in seq_ids:
            entry = self._sequences.get(seq_id)
            if entry is not None:
                entry.is_admitted = True

    def farewell(self, farewell: dense_pb2.Farewell) -> None:
        """The dense worker ends the stream itself."""
        self._farewell = farewell

    def connected(self, epoch: int) -> None:
        """There is a dense worker again: only now it is known whether the last one died."""
        is_crash = self._epoch not in (None, epoch) if self._farewell is None else self._farewell.is_crash
        self._end_stream(is_crash=is_crash)
        self._epoch = epoch

    def left(self) -> None:
        """The sequences go on with another worker at once. Why this stream ended, if not by a farewell, stays unknown:
        it is taken for a crash, or a request could kill one worker after the other.
        """
        self._end_stream(is_crash=self._farewell is None or self._farewell.is_crash)

    def _end_stream(self, *, is_crash: bool) -> None:
        present = [entry for entry in self._sequences.unfinished() if entry.is_admitted]
        for entry in present:
            entry.is_admitted = False
        farewell, self._farewell, self._epoch = self._farewell, None, None
        if is_crash and present:
            spans = None if farewell is None else {span.seq_id: span for span in farewell.running}
            self._count_crash(present, spans)

    def _count_crash(
        self, present: list[JournalEntry], spans: Mapping[int, dense_pb2.SequenceSpan] | None
    ) -> None:
        """`spans`: what steps were computing, by seq_id; None: nobody can tell."""
        log.warning("a worker crashed", running=len(present) if spans is None else len(spans), admitted=len(present))
        for entry in present:
            if spans is None:
                entry.crash_start = 0
            else:
                span = spans.get(entry.seq_id)
                if span is None or (entry.num_crashes and span.end <= entry.crash_start):
                    continue
                entry.crash_start = span.start
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
