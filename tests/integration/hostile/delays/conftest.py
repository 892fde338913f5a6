"""A server on a core of its own for each process of tests, whose services wait for each other as they do for users,
because these tests measure delays.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.support.file_queue import process_number
from tests.support.warm_process import SPINS


@pytest.fixture(scope="session", autouse=True)
def spinning() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(SPINS, "1")
        yield


@pytest.fixture(scope="session")
def on_one_core(pytestconfig: pytest.Config) -> tuple[str, ...]:
    """The command that executes another one on one core: a different one in each process of tests, if there are any."""
    cores = sorted(os.sched_getaffinity(0))
    return "taskset", "--cpu-list", str(cores[process_number(pytestconfig) % len(cores)])
