"""Optimization profiles: the ranges of sizes that a TensorRT plan is tuned for, each at its own optimum.

Written as `1-16,17-128@64`: from, to, and after @ the size to tune for. The size counts tokens, or for the
segment `last` the rows that need logits.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from services.common.errors import ConfigError

_RANGE = re.compile(r"(\d+)-(\d+)(?:@(\d+))?")


@dataclass(frozen=True, slots=True)
class Profile:
    """Sizes from `low` to `high`, both included, at its fastest for `best`."""

    low: int
    best: int
    high: int

    def __str__(self) -> str:
        return f"{self.low}-{self.high}@{self.best}"


def parse_profiles(text: str) -> tuple[Profile, ...]:
    """Profiles without a gap, from size 1 upwards.

    The default optimum is the power of two nearest the range's geometric middle: 4 of 1-16, 2048 of
    513-8192. Raises ConfigError naming the range that is not well-formed, or the sizes left out.
    """
    profiles: list[Profile] = []
    for part in text.split(","):
        match = _RANGE.fullmatch(part.strip())
        if match is None:
            raise ConfigError(
                f"profile {part.strip()!r} of {text!r} is not of the form FROM-TO or FROM-TO@BEST"
            )
        low, high = int(match[1]), int(match[2])
        best = int(match[3] or _geometric_middle(low, high))
        if not 1 <= low <= best <= high:
            raise ConfigError(
                f"profile {part.strip()!r} of {text!r} is not in the order 1 <= FROM <= BEST <= TO"
            )
        expected = profiles[-1].high + 1 if profiles else 1
        if low != expected:
            raise ConfigError(
                f"profiles {text!r} must go on at {expected} without gap or overlap, not at {low}"
            )
        profiles.append(Profile(low, best, high))
    return tuple(profiles)


def format_profiles(profiles: Sequence[Profile]) -> str:
    """What `parse_profiles` reads back."""
    return ",".join(map(str, profiles))


@dataclass(frozen=True, slots=True)
class Limits:
    """The largest sizes that a step asks for."""

    num_tokens: int  # of `first` and `middle`
    num_rows: int  # of `last`


def check_cover(profiles: Sequence[Profile], limits: Limits) -> None:
    """Raises ConfigError for profiles that end below a limit."""
    end = profiles[-1].high
    for name, limit in (("max_num_batched_tokens", limits.num_tokens), ("max_num_seqs", limits.num_rows)):
        if limit > end:
            raise ConfigError(
                f"scheduler.{name} is {limit}, dense.profiles {format_profiles(profiles)!r} end at {end}: "
                f"add a profile {end + 1}-{limit}"
            )


def profile_index(profiles: Sequence[Profile], size: int) -> int:
    """The profile that holds `size`. Raises ConfigError when none does."""
    for index, profile in enumerate(profiles):
        if profile.low <= size <= profile.high:
            return index
    raise ConfigError(f"size {size} is not covered by profiles {format_profiles(profiles)}")


def _geometric_middle(low: int, high: int) -> int:
    power_of_two = 2 ** round(math.log2(max(1, low * high)) / 2)
    return min(max(power_of_two, low), high)
