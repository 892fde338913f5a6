"""Optimization profiles: the ranges of sizes that TensorRT's plans support, each tuned for one size.

Each plan has one of them. They are written as `1-16,17-128@64`: first size, last size and, after @, the size to tune
for; a single size as `16`. A size is a number of tokens, or for the segment `last` the number of rows that need
logits. In a plan for a single size all shapes are static. It also runs smaller sizes that no other profile has, padded.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from services.common.errors import ConfigError

_RANGE = re.compile(r"(\d+)(?:-(\d+)(?:@(\d+))?)?")


@dataclass(frozen=True, slots=True)
class Profile:
    """Sizes from `low` to `high`, both included, tuned for `best`."""

    low: int
    best: int
    high: int

    def __str__(self) -> str:
        return f"{self.low}-{self.high}@{self.best}"


def parse_profiles(text: str) -> tuple[Profile, ...]:
    """The profiles of `dense.profiles`. They must cover all sizes from 1 on, without a gap but below a single size.

    By default a profile is tuned for the power of two nearest the geometric middle of its range: 4 for 1-16, 2048 for
    513-8192. Raises ConfigError that names the malformed range or the missing sizes.
    """
    profiles: list[Profile] = []
    for part in text.split(","):
        profile = parse_profile(part.strip())
        next_size = profiles[-1].high + 1 if profiles else 1
        if profile.low != next_size and not (profile.low == profile.high > next_size):
            if not profiles:
                raise ConfigError(f"profiles {text!r} must begin at 1, not at {profile.low}")
            raise ConfigError(
                f"profiles {text!r} must go on at {next_size} without gap or overlap, not at {profile.low}"
            )
        profiles.append(profile)
    return tuple(profiles)


def parse_profile(text: str) -> Profile:
    """One range, which may begin at any size from 1 on. Raises ConfigError if it is malformed."""
    match = _RANGE.fullmatch(text)
    if match is None:
        raise ConfigError(f"profile {text!r} is not of the form SIZE, FROM-TO or FROM-TO@BEST")
    low = int(match[1])
    high = int(match[2] or low)
    best = int(match[3] or _geometric_middle(low, high))
    if not 1 <= low <= best <= high:
        raise ConfigError(f"profile {text!r} is not in the order 1 <= FROM <= BEST <= TO")
    return Profile(low, best, high)


def format_profiles(profiles: Sequence[Profile]) -> str:
    """The text that `parse_profiles` reads back to the same profiles."""
    return ",".join(map(str, profiles))


@dataclass(frozen=True, slots=True)
class Limits:
    """The largest sizes of a step."""

    num_tokens: int  # tokens of `first` and `middle`
    num_rows: int  # rows of `last`

    def of(self, segment: str) -> int:
        """The largest size of a segment."""
        return self.num_rows if segment == "last" else self.num_tokens


def check_cover(profiles: Sequence[Profile], limits: Limits) -> None:
    """Raises ConfigError if the profiles end below a limit."""
    end = profiles[-1].high
    for name, limit in (("max_num_batched_tokens", limits.num_tokens), ("max_num_seqs", limits.num_rows)):
        if limit > end:
            raise ConfigError(
                f"scheduler.{name} is {limit}, dense.profiles {format_profiles(profiles)!r} end at {end}: "
                f"add a profile {end + 1}-{limit}"
            )


def profile_index(profiles: Sequence[Profile], size: int) -> int:
    """The index of the profile that runs `size`. Raises ConfigError if there is none."""
    for index, profile in enumerate(profiles):
        if size <= profile.high:
            return index
    raise ConfigError(f"size {size} is not covered by profiles {format_profiles(profiles)}")


def num_reached(profiles: Sequence[Profile], limit: int) -> int:
    """How many of the profiles, the first ones, run the sizes up to a limit."""
    return next((index for index, profile in enumerate(profiles, 1) if profile.high >= limit), len(profiles))


def _geometric_middle(low: int, high: int) -> int:
    power_of_two = 2 ** round(math.log2(max(1, low * high)) / 2)
    return min(max(power_of_two, low), high)
