"""The limits on connections when the process may open only few files."""

from __future__ import annotations

import pytest

from services.gateway.resources.open_files import share_files


@pytest.mark.parametrize(
    ("num_files", "expected"),
    [
        (1_000_000, (4096, 1024)),  # as configured
        (5120, (4096, 1024)),
        (2560, (2048, 512)),  # both are lowered in proportion
        (-50, (8, 8)),  # no files are left, but the gateway still serves
    ],
)
def test_limits_are_lowered_to_the_available_files(num_files: int, expected: tuple[int, int]) -> None:
    assert share_files(num_files, 4096, 1024) == expected


def test_no_limit_is_raised() -> None:
    assert share_files(0, 3, 1024) == (3, 8)
