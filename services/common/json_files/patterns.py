"""`PatternMatcher`: applies regular expressions of requests and of models' and adapters' files, which may be hostile.

The package regex limits the time of a match, but not what compiling takes: it repeats the parts that must occur
several times, also those within each other. So the size of a pattern is limited before it is compiled.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable

import regex

from services.common.shorten import show

MAX_PATTERN_CHARACTERS = 4096
MAX_PATTERN_SIZE = 100_000
_LEAST_COUNT = re.compile(r"\{\s*(\d+)")
# What the package has beyond Python's re, such as patterns that contain themselves, and endless memory for them.
_EXTENSION = re.compile(r"\(\?(?![:=!>#]|<[=!]|P[<=]|[aimsux-]+[:)])")


class PatternError(ValueError):
    """A pattern that is not valid, is too large, or takes too long."""


class PatternMatcher:
    """Patterns that together may take `max_s` seconds of processor time, in one thread. Other threads run meanwhile.

    A busy machine may let the process stand still for longer, which no pattern has caused.
    """

    def __init__(self, max_s: float) -> None:
        self._max_s = max_s
        self._left_s = max_s
        self._compiled: dict[str, regex.Pattern[str]] = {}

    def match(self, pattern: str, text: str) -> regex.Match[str] | None:
        """The match at the start of the text, as by `re.match`. Raises `PatternError`."""
        return self._within_time(pattern, text, regex.Pattern.match)

    def search(self, pattern: str, text: str) -> regex.Match[str] | None:
        """The first match anywhere in the text, as by `re.search`. Raises `PatternError`."""
        return self._within_time(pattern, text, regex.Pattern.search)

    def _within_time(
        self, pattern: str, text: str, find: Callable[..., regex.Match[str] | None]
    ) -> regex.Match[str] | None:
        begin_s = time.thread_time()
        try:
            if self._left_s > 0:
                compiled = self._compiled.get(pattern)
                if compiled is None:
                    compiled = self._compiled[pattern] = compile_pattern(pattern)
                return find(compiled, text, timeout=self._left_s, concurrent=True)  # of processor time, too
        except TimeoutError:
            pass
        finally:
            self._left_s -= time.thread_time() - begin_s
        raise PatternError(f"patterns take longer than {self._max_s:g} s, such as {show(pattern)}")


def compile_pattern(pattern: str) -> regex.Pattern[str]:
    """The compiled pattern. Raises `PatternError` for one that is too large or not valid."""
    if len(pattern) > MAX_PATTERN_CHARACTERS:
        raise PatternError(
            f"the pattern {show(pattern)} has {len(pattern)} characters, at most {MAX_PATTERN_CHARACTERS} allowed"
        )
    if (extension := _EXTENSION.search(pattern)) is not None:
        raise PatternError(f"the pattern {show(pattern)} is not valid: unknown group at {extension.start()}")
    # As if each repetition contained all others: a plus repeats its part once, {5} five times.
    counts = [max(int(count), 1) for count in _LEAST_COUNT.findall(pattern)]
    size = len(pattern) * 2 ** pattern.count("+") * math.prod(counts)
    if size > MAX_PATTERN_SIZE:
        raise PatternError(
            f"the pattern {show(pattern)} may have {min(size, 10**9)} characters or more with its repetitions, at most "
            f"{MAX_PATTERN_SIZE} allowed"
        )
    try:
        return regex.compile(pattern)
    except (regex.error, ValueError, RecursionError) as error:
        raise PatternError(f"the pattern {show(pattern)} is not valid: {error}") from error
