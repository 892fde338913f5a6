"""A request that a worker's death interrupts, on a machine that may be too busy to kill in time."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

MAX_ATTEMPTS = 5  # until the kill comes before the answer

T = TypeVar("T")


def over_a_kill(ask: Callable[[], T], count: Callable[[], int], least: int, kill: Callable[[], object]) -> T:
    """The answer to `ask`, where `kill` was called once `count` had grown by `least`, and before the answer came."""
    for _ in range(MAX_ATTEMPTS):
        with ThreadPoolExecutor(1) as threads:
            before = count()
            answer = threads.submit(ask)
            while count() < before + least and not answer.done():
                time.sleep(0.002)
            if not answer.done():
                kill()
                return answer.result()
            answer.result()
    raise AssertionError(f"in each of {MAX_ATTEMPTS} attempts the answer came before the kill")
