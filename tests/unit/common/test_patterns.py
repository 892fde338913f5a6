"""The time that patterns may take is processor time, which a stopped process does not spend."""

from __future__ import annotations

import time

import pytest

from services.common.json_files.patterns import PatternError, PatternMatcher

MAX_S = 0.1
SLOW = r"(?:a|aa)+b"  # tries as many ways to read "aaa..." as a Fibonacci number


def test_time_in_which_the_process_stands_still_does_not_count() -> None:
    matcher = PatternMatcher(MAX_S)
    for _ in range(2):  # before the first pattern and between two
        time.sleep(2 * MAX_S)
        assert matcher.match(r"model\.layers\.\d+", "model.layers.7") is not None
    assert matcher.search(r"_proj$", "model.layers.7.q_proj") is not None


def test_quick_patterns_together_are_limited_as_one_slow_pattern_is() -> None:
    matcher, num_matches = PatternMatcher(MAX_S), 0
    with pytest.raises(PatternError, match=r"patterns take longer than 0\.1 s, such as .*\(\?:a"):
        while True:
            assert matcher.match(SLOW, "a" * 18) is None
            num_matches += 1
    assert num_matches > 1
    with pytest.raises(PatternError, match="take longer"):
        matcher.match("a", "a")
