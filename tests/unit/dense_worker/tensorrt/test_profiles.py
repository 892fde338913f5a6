"""Profiles as they are written, and which sizes they cover."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.common.config import DenseSection
from services.common.errors import ConfigError
from services.dense_worker.tensorrt.profiles import (
    Limits,
    Profile,
    check_cover,
    format_profiles,
    num_reached,
    parse_profile,
    parse_profiles,
    profile_index,
)


def test_default_profiles_have_one_for_a_single_token() -> None:
    profiles = parse_profiles(DenseSection().profiles)
    assert [(p.low, p.high) for p in profiles] == [
        *((size, size) for size in (1, 32, 64, 128, 256, 384, 512)),
        (513, 8192),
    ]
    assert profiles[-1].best == 2048


def test_an_optimum_may_be_named() -> None:
    assert parse_profiles("1-16@1, 17-40@40") == (Profile(1, 1, 16), Profile(17, 40, 40))


def test_a_single_size_may_lie_behind_a_gap() -> None:
    profiles = parse_profiles("1,16,17-40,64-64@64")
    assert profiles == (Profile(1, 1, 1), Profile(16, 16, 16), Profile(17, 32, 40), Profile(64, 64, 64))
    assert parse_profiles(format_profiles(profiles)) == profiles
    assert [profile_index(profiles, size) for size in (1, 2, 16, 17, 40, 41, 64)] == [0, 1, 1, 2, 2, 3, 3]
    assert parse_profiles("8") == (Profile(8, 8, 8),)
    with pytest.raises(ConfigError, match="must go on at 65 without gap or overlap, not at 64"):
        parse_profiles("64,64")
    with pytest.raises(ConfigError, match="must go on at 17"):
        parse_profiles("16,18-20")


def test_those_up_to_a_limit_are_reached() -> None:
    profiles = parse_profiles("1,16,17-40,64")
    assert [num_reached(profiles, limit) for limit in (1, 2, 16, 17, 40, 41, 64, 65)] == [1, 2, 2, 3, 3, 4, 4, 4]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "profile '' is not of the form"),
        ("1-16,banana", "profile 'banana'"),
        ("1-16,18-20", "must go on at 17"),
        ("1-16,16-20", "must go on at 17"),
        ("2-16", "must begin at 1, not at 2"),
        ("0-16", "order 1 <= FROM <= BEST <= TO"),
        ("1-16@17", "order 1 <= FROM <= BEST <= TO"),
        ("9-4", "order 1 <= FROM <= BEST <= TO"),
    ],
)
def test_profiles_that_cannot_be_are_refused_by_name(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_profiles(text)


def test_that_of_one_plan_may_begin_anywhere() -> None:
    assert parse_profile("17-40@40") == Profile(17, 40, 40) and parse_profile("41-64") == Profile(41, 64, 64)
    with pytest.raises(ConfigError, match="'17-40,41-64' is not of the form"):
        parse_profile("17-40,41-64")


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=6), st.data())
def test_every_size_up_to_the_end_is_in_the_profile_that_holds_it(
    widths: list[int], data: st.DataObject
) -> None:
    parts, low = [], 1
    for width in widths:
        parts.append(f"{low}-{low + width - 1}")
        low += width
    profiles = parse_profiles(",".join(parts))
    assert parse_profiles(format_profiles(profiles)) == profiles
    size = data.draw(st.integers(1, low - 1))
    found = profiles[profile_index(profiles, size)]
    assert found.low <= size <= found.high and found.low <= found.best <= found.high
    with pytest.raises(ConfigError, match=f"size {low} is not covered"):
        profile_index(profiles, low)


def test_limits_beyond_the_end_are_refused() -> None:
    profiles = parse_profiles("1-16,17-64")
    check_cover(profiles, Limits(64, 16))
    with pytest.raises(
        ConfigError, match=r"scheduler\.max_num_batched_tokens is 65, .* end at 64: add a profile 65-65"
    ):
        check_cover(profiles, Limits(65, 16))
    with pytest.raises(ConfigError, match=r"scheduler\.max_num_seqs is 100"):
        check_cover(profiles, Limits(64, 100))
