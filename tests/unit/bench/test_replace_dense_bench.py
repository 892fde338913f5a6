"""The figure of `bench/replace_dense.py`: the longest silence, computed from the times of tokens."""

from __future__ import annotations

import pytest

from bench.replace_dense import longest_silence_ms


def test_the_longest_silence_includes_the_start_and_end_of_the_period() -> None:
    times_s = [1.0, 1.1, 1.4, 1.5, 3.0]
    assert longest_silence_ms(times_s, 1.0, 1.5) == pytest.approx(300)
    assert longest_silence_ms(times_s, 0.0, 1.5) == pytest.approx(1000), "the period begins with a silence"
    assert longest_silence_ms(times_s, 1.0, 2.5) == pytest.approx(1000), "the token at 3 s is outside the period"
    assert longest_silence_ms([], 1.0, 2.0) == pytest.approx(1000)
