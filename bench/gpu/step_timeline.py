"""The timeline of one decode step through both workers, kernel by kernel, from a profile of each worker.

A kernel may start before the previous one has ended, to read weights; its time counts from that end. The clocks of the
two processes may differ by some microseconds. The attention kernel of each layer lies between two dense kernels, so the
sum of the gaps before and after it is known, but not each gap; they are shown as equal.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

MAX_NAME_LENGTH = 48
FLAG_KERNELS = ("set_flag", "take_flag")  # kernels of the handoff; see services/channel/cuda_flags.py


@dataclass(frozen=True, slots=True)
class Kernel:
    """One run of a kernel, in microseconds of its process's clock."""

    name: str
    start_us: float
    duration_us: float

    @property
    def end_us(self) -> float:
        return self.start_us + self.duration_us


@dataclass(frozen=True, slots=True)
class Span:
    """A part of the step's critical path: a kernel, counted from the end of the previous one, or a gap."""

    name: str
    where: str  # "start", "layer" or "end" of the step
    us: float  # the median over the layers
    count: int  # number of such spans in the step


def make_timeline(dense: Sequence[Kernel], attention: Sequence[Kernel]) -> list[Span]:
    """The spans of a step, from its kernels in each worker, in order; attention has one kernel per layer."""
    dense = [kernel for kernel in dense if kernel.name not in FLAG_KERNELS]
    attention = [kernel for kernel in attention if kernel.name not in FLAG_KERNELS]
    num_layers = len(attention)
    gaps = [second.start_us - first.end_us for first, second in itertools.pairwise(dense)]
    # The longest gaps are those where dense kernels wait for attention.
    holes = sorted(sorted(range(len(gaps)), key=gaps.__getitem__)[-num_layers:])
    borders = [0, *(hole + 1 for hole in holes), len(dense)]
    segments = [dense[start:end] for start, end in itertools.pairwise(borders)]
    layers = segments[1:-1]
    if len({len(segment) for segment in layers}) > 1:
        raise ValueError(f"layers differ in their numbers of kernels: {[len(segment) for segment in layers]}")
    waits = [(gaps[hole] - kernel.duration_us) / 2 for hole, kernel in zip(holes, attention, strict=True)]
    handoff_us = statistics.median(waits)
    spans = _segment_spans([segments[0]], "start")
    spans += [
        Span("handoff to attention", "layer", handoff_us, num_layers),
        Span(attention[0].name, "layer", statistics.median(kernel.duration_us for kernel in attention), num_layers),
        Span("handoff to dense", "layer", handoff_us, num_layers),
    ]
    if layers:
        spans += _segment_spans(layers, "layer")
    return spans + _segment_spans([segments[-1]], "end")


def format_timeline(spans: Sequence[Span]) -> str:
    """A table with each span's share of the step."""
    step_us = sum(span.us * span.count for span in spans)
    lines = [f"{'where':6} {'what':{MAX_NAME_LENGTH}} {'us':>8} {'times':>6} {'ms':>7} {'share':>6}"]
    for span in spans:
        total_us = span.us * span.count
        name = span.name[:MAX_NAME_LENGTH]
        lines.append(
            f"{span.where:6} {name:{MAX_NAME_LENGTH}} {span.us:8.2f} {span.count:6} {total_us / 1e3:7.3f} "
            f"{total_us / step_us:6.1%}"
        )
    lines.append(f"{'':6} {'sum':{MAX_NAME_LENGTH}} {'':8} {'':6} {step_us / 1e3:7.3f}")
    return "\n".join(lines)


def _segment_spans(segments: Sequence[Sequence[Kernel]], where: str) -> list[Span]:
    """The kernels and gaps of segments that all run the same kernels."""
    count = len(segments)
    spans = []
    for index, kernel in enumerate(segments[0]):
        gaps = [each[index].start_us - each[index - 1].end_us if index else 0.0 for each in segments]
        gap = max(0.0, statistics.median(gaps))
        if gap:
            spans.append(Span("gap", where, gap, count))
        own = [each[index].duration_us + min(0.0, early) for each, early in zip(segments, gaps, strict=True)]
        spans.append(Span(kernel.name, where, statistics.median(own), count))
    return spans
