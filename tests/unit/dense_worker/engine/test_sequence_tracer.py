"""The spans of a sequence: one for the whole, and one for each part that it reached: queue, prefill, decode."""

from __future__ import annotations

import time
from typing import Any

import pytest

from services.common.sampling_params import SamplingParams
from services.dense_worker.engine.sequence import Sequence
from services.dense_worker.engine.tracing import SequenceTracer
from services.rpc.spans import NoTracer
from tests.support.dense.sequences import ask, new_sequence


class RecordingSpan:
    def __init__(self, name: str, traceparent: str) -> None:
        self.traceparent = f"{traceparent}/{name}"
        self.children: list[tuple[str, float, float]] = []
        self.ends: list[tuple[str | None, dict[str, Any]]] = []

    def add_child(self, name: str, start_s: float, end_s: float) -> None:
        self.children.append((name, start_s, end_s))

    def end(self, error: str | None = None, **attributes: Any) -> None:
        self.ends.append((error, attributes))


class RecordingTracer:
    is_enabled = True

    def __init__(self) -> None:
        self.spans: list[RecordingSpan] = []

    def start(self, name: str, traceparent: str, start_s: float | None = None, **attributes: Any) -> RecordingSpan:
        self.spans.append(RecordingSpan(name, traceparent))
        return self.spans[-1]


def begin() -> tuple[SequenceTracer, Sequence, RecordingTracer]:
    tracer = RecordingTracer()
    sequences = SequenceTracer(tracer)
    sequence = new_sequence(1, "r", [5], SamplingParams(), max_tokens=3, arrival_s=time.monotonic() - 10)
    ask(sequence, traceparent="parent")
    sequences.begin(sequence, is_recovered=False)
    return sequences, sequence, tracer


@pytest.mark.parametrize("num_parts", [1, 2, 3])
def test_a_sequence_has_a_span_for_each_part_that_it_reached(num_parts: int) -> None:
    sequences, sequence, tracer = begin()
    assert sequence.traceparent == "parent/sequence"
    if num_parts > 1:
        sequence.started_s = sequence.arrival_s + 2
    if num_parts > 2:
        sequence.first_token_s = sequence.arrival_s + 3
    sequences.end(1, "cancelled")
    [span] = tracer.spans
    assert [name for name, _, _ in span.children] == ["queue", "prefill", "decode"][:num_parts]
    for (_, _, end_s), (_, start_s, _) in zip(span.children, span.children[1:], strict=False):
        assert end_s == start_s
    assert span.children[0][1] == sequence.arrival_s
    assert span.children[-1][2] == pytest.approx(time.monotonic(), abs=5.0)
    assert span.ends == [(None, {"outcome": "cancelled", "num_output_tokens": 0, "num_cached_tokens": 0})]


def test_only_known_sequences_end_and_only_once() -> None:
    sequences, _, tracer = begin()
    sequences.end(2, "stop")
    sequences.end(1, "error", "no room")
    sequences.end(1, "cancelled")
    assert [end[0] for end in tracer.spans[0].ends] == ["no room"]


def test_a_resubmitted_sequence_replaces_the_first_one() -> None:
    sequences, sequence, tracer = begin()
    sequences.begin(sequence, is_recovered=False)
    assert [len(span.ends) for span in tracer.spans] == [1, 0]
    assert tracer.spans[0].ends[0][1]["outcome"] == "replaced"


def test_without_tracing_nothing_is_kept() -> None:
    sequences = SequenceTracer(NoTracer())
    sequence = new_sequence(1, "r", [5], SamplingParams(), max_tokens=3, traceparent="parent")
    sequences.begin(sequence, is_recovered=False)
    assert sequence.traceparent == ""
    sequences.end(1, "stop")
