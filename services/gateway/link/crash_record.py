"""`CrashRecord`: finds the request that kills workers, so that only this request fails and the others continue.

A worker's crash proves nothing against the sequences that it was running, since most crashes have other causes. So
after a first crash all of them continue together. A token clears a sequence. Sequences that see a second crash without
a token are suspects, and the dense worker runs suspects one at a time: the next crash shows the cause. A sequence that
was alone in two consecutive crashes needs no third one.

Only crashes count, not a broken stream of a living worker and not an end that a worker announced. They count only for
sequences that a running step was computing. After an attention worker's crash its dense worker reports these sequences
and their positions: text that was computed before without a crash, and is only computed again, is not the cause. A dead
dense worker cannot report, so all sequences that it had admitted count, but not those in its queue. A step of a beam
search clears it as a token does. Runs in the gateway's event loop.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import structlog

from services.common.errors import RequestAborted
from services.gateway.link.journal_entry import JournalEntry, StreamSequences
from services.pb import dense_pb2

log = structlog.get_logger()

MAX_CRASHES_TOGETHER = 2  # after this many the dense worker runs the sequence alone; see `Sequence.is_suspect` there


class CrashRecord:
    """Counts crashes. The `DenseClient` reports what happens to its streams."""

    def __init__(self, sequences: StreamSequences) -> None:
        self._sequences = sequences
        self._epoch: int | None = None  # of the dense worker of the last stream
        self._farewell: dense_pb2.Farewell | None = None  # of the last stream, if there was one

    def record_admitted(self, seq_ids: Iterable[int]) -> None:
        """Records that the dense worker may run these sequences from now on."""
        for seq_id in seq_ids:
            entry = self._sequences.get(seq_id)
            if entry is not None:
                entry.is_admitted = True

    def record_farewell(self, farewell: dense_pb2.Farewell) -> None:
        """Records that the dense worker ends the stream itself."""
        self._farewell = farewell

    def record_connected(self, epoch: int) -> None:
        """Records that a dense worker is connected again: only now it is known whether the last one died."""
        is_crash = self._epoch not in (None, epoch) if self._farewell is None else self._farewell.is_crash
        self._end_stream(is_crash=is_crash)
        self._epoch = epoch

    def record_sequences_moved(self) -> None:
        """Records that the sequences continue at once on another worker.

        Without a farewell the end of the stream counts as a crash; otherwise a request could kill one worker after the
        other.
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
        """`spans`: what running steps were computing, by seq_id; None if unknown."""
        log.warning("a worker crashed", running=len(present) if spans is None else len(spans), admitted=len(present))
        gateways = {seq_id >> 32 for seq_id in (present[0].seq_id, *(spans or ()))}  # rows of a beam search are of one
        is_one = len(present) == 1 == len(gateways)
        for entry in present:
            if spans is None:
                entry.crash_start = 0
            else:
                span = spans.get(entry.seq_id)
                if span is None or (entry.num_crashes and span.end <= entry.crash_start):
                    continue
                entry.crash_start = span.start
            entry.num_crashes += 1
            was_alone, entry.was_alone_in_crash = entry.was_alone_in_crash, is_one
            is_alone = (was_alone and entry.was_alone_in_crash) or entry.num_crashes > MAX_CRASHES_TOGETHER
            if is_alone and entry.num_crashes >= MAX_CRASHES_TOGETHER:
                log.error("request given up", request_id=entry.spec.request_id, num_crashes=entry.num_crashes)
                entry.fail(
                    RequestAborted(
                        f"request {entry.spec.request_id!r} was running in {entry.num_crashes} crashes of a worker "
                        "in a row, alone in the last one; it is not tried again"
                    )
                )
