"""`bench/first_token/first_token.py`: the functions that it notes, and the rows that it makes of their calls."""

from __future__ import annotations

import functools
import importlib

import pytest

from bench.first_token.first_token import POINTS, Noted, rows_of


@pytest.mark.parametrize(("module", "function"), [point[:2] for point in POINTS])
def test_noted_function_exists(module: str, function: str) -> None:
    assert callable(functools.reduce(getattr, function.split("."), importlib.import_module(module)))


def test_rows_have_time_and_calls_since_the_row_before() -> None:
    names = [f"{module}:{function}" for module, function, _ in POINTS]
    noted = [Noted(1_000 * (i + 1), name, pid=i % 2, num_calls=10 * i * i) for i, name in enumerate(names)]
    between = Noted(1_500, names[-1], pid=0, num_calls=7)  # of another request
    noted.insert(1, between)
    asked = 0, 1_000 * len(names) + 500
    assert rows_of(asked, noted, calls=False) == [*[1.0] * len(names), 0.5]
    of_rows = [0 if i < 2 else 10 * i * i - 10 * (i - 2) ** 2 for i in range(len(names))]
    assert rows_of(asked, noted, calls=True) == of_rows
