"""`SequenceTracer`: the dense worker's part of a request's trace. Runs on the event loop.

A sequence is one span, from its arrival to its end, with queue, prefill and decode below it. The engine thread only
stores their times in the sequence.
"""

from __future__ import annotations

import time

from services.dense_worker.engine.sequence import Sequence
from services.rpc.spans import Span, Tracer


class SequenceTracer:
    """Holds the spans of all sequences that have not ended."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._open: dict[int, tuple[Sequence, Span]] = {}  # by seq_id

    def begin(self, sequence: Sequence, *, is_recovered: bool) -> None:
        """Starts the span of an arrived sequence in the gateway's trace and stores its context in the sequence.

        `is_recovered`: it was submitted again with tokens
        """
        if not self._tracer.is_enabled:
            return
        self.end(sequence.seq_id, "replaced")
        span = self._tracer.start(
            "sequence",
            sequence.spec.traceparent,
            sequence.arrival_s,
            request_id=sequence.spec.request_id,
            seq_id=f"{sequence.seq_id:x}",
            num_prompt_tokens=sequence.num_prompt_tokens,
            is_recovered=is_recovered,
        )
        sequence.traceparent = span.traceparent
        self._open[sequence.seq_id] = sequence, span

    def end(self, seq_id: int, outcome: str, error: str | None = None) -> None:
        """Ends the span of a sequence; unknown ones are ignored."""
        sequence, span = self._open.pop(seq_id, (None, None))
        if sequence is None or span is None:
            return
        now_s = time.monotonic()
        started_s, first_token_s = sequence.started_s, sequence.first_token_s
        span.add_child("queue", sequence.arrival_s, now_s if started_s is None else started_s)
        if started_s is not None:
            span.add_child("prefill", started_s, now_s if first_token_s is None else first_token_s)
        if first_token_s is not None:
            span.add_child("decode", first_token_s, now_s)
        span.end(
            error,
            outcome=outcome,
            num_output_tokens=len(sequence.output_token_ids),
            num_cached_tokens=sequence.num_cached_tokens or 0,
        )
