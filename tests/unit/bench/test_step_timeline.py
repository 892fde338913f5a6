"""The parts of a step's timeline add up to the step, even if kernels overlap and clocks differ."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.gpu.step_timeline import Kernel, Span, format_timeline, make_timeline

HANDOFF_US, ATTENTION_US = 4.0, 100.0
CLOCK_OFFSET_US = 17.0  # of the clock in the attention worker's process
LAYER = [("o", 10.0), ("gate_up", 40.0), ("qkv", 20.0)]  # kernels and their durations in us


def make_step(num_layers: int, gap_us: float, early_us: float) -> tuple[list[Kernel], list[Kernel]]:
    """The kernels of a step. Dense kernels have a gap of `gap_us`; without a gap they start `early_us` too early."""
    dense, attention = [], []
    now = 0.0
    for layer in range(num_layers + 1):
        kernels = {0: LAYER[2:], num_layers: [*LAYER[:2], ("head", 60.0)]}.get(layer, LAYER)
        for index, (name, duration) in enumerate(kernels):
            early = early_us if index and not gap_us else 0.0
            now += gap_us if index else 0.0
            dense.append(Kernel(name, now - early, duration + early))
            now += duration
        if layer < num_layers:
            attention.append(Kernel("attend", now + HANDOFF_US + CLOCK_OFFSET_US, ATTENTION_US))
            now += 2 * HANDOFF_US + ATTENTION_US
    return dense, attention


@given(st.integers(2, 40), st.sampled_from([0.0, 0.5, 2.0]), st.floats(0.0, 8.0))
def test_the_spans_add_up_to_the_step(num_layers: int, gap_us: float, early_us: float) -> None:
    dense, attention = make_step(num_layers, gap_us, early_us)
    spans = make_timeline(dense, attention)
    assert sum(span.us * span.count for span in spans) == pytest.approx(dense[-1].end_us - dense[0].start_us)
    assert all(span.us >= 0 for span in spans)


def test_each_kernel_and_gap_of_a_layer_has_its_name_and_time() -> None:
    spans = make_timeline(*make_step(num_layers=3, gap_us=0.5, early_us=0.0))
    layer = [(span.name, span.us, span.count) for span in spans if span.where == "layer"]
    assert layer == [
        ("handoff to attention", HANDOFF_US, 3),
        ("attend", ATTENTION_US, 3),
        ("handoff to dense", HANDOFF_US, 3),
        ("o", 10.0, 2),
        ("gap", 0.5, 2),
        ("gate_up", 40.0, 2),
        ("gap", 0.5, 2),
        ("qkv", 20.0, 2),
    ]


def test_the_kernels_of_the_handoff_count_as_handoff() -> None:
    dense, attention = make_step(num_layers=3, gap_us=0.5, early_us=0.0)
    polling = [Kernel("take_flag", first.end_us, second.start_us - first.end_us) for first, second in pairwise(dense)]
    assert make_timeline(sorted([*dense, *polling], key=lambda kernel: kernel.start_us), attention) == make_timeline(
        dense, attention
    )


def test_a_table_ends_with_the_sum() -> None:
    lines = format_timeline([Span("attend", "layer", 100.0, 32), Span("o", "layer", 10.0, 31)]).splitlines()
    assert lines[1].split() == ["layer", "attend", "100.00", "32", "3.200", "91.2%"]
    assert lines[-1].split() == ["sum", "3.510"]
