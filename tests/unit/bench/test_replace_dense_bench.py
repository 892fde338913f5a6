"""The one figure of `bench/replace_dense.py`, from times of tokens."""

from __future__ import annotations

import pytest

from bench.replace_dense import longest_silence_ms


def test_the_longest_silence_is_within_the_period_and_counts_from_its_ends() -> None:
    times_s = [1.0, 1.1, 1.4, 1.5, 3.0]
    assert longest_silence_ms(times_s, 1.0, 1.5) == pytest.approx(300)
    assert longest_silence_ms(times_s, 0.0, 1.5) == pytest.approx(1000), "nothing came at first"
    assert longest_silence_ms(times_s, 1.0, 2.5) == pytest.approx(1000), "the token at 3 s is not of this period"
    assert longest_silence_ms([], 1.0, 2.0) == pytest.approx(1000)
