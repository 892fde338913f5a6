"""Sequences that take long of the host's time take turns, and all others are in each step."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from services.dense_worker.engine.step_planner import MAX_HOST_S, HostTurns


@dataclass(frozen=True, slots=True)
class Costly:
    host_s: float


@dataclass(eq=False, slots=True)
class Waiting:
    order: tuple[float, int]
    features: list[Costly] = field(default_factory=list)


def choose(turns: HostTurns, sequences: list[Waiting]) -> list[Waiting]:
    return cast(list[Waiting], turns.choose(cast(Any, sequences)))


def test_what_fits_is_in_each_step() -> None:
    sequences = [Waiting((0.0, i), [Costly(MAX_HOST_S / 16)] * (i % 2)) for i in range(32)]
    for _ in range(3):
        assert choose(HostTurns(), sequences) == sequences


@pytest.mark.parametrize(("host_s", "at_once"), [(0.004, 5), (0.5, 1)])
def test_slow_ones_take_turns_and_delay_nobody_else(host_s: float, at_once: int) -> None:
    slow = [Waiting((0.0, 2 * i), [Costly(host_s)]) for i in range(16)]
    others = [Waiting((0.0, 2 * i + 1), [Costly(0.0004)]) for i in range(16)] + [Waiting((1.0, 0))]
    both = [each for pair in zip(others, slow, strict=False) for each in pair] + others[16:]
    turns, counts = HostTurns(), Counter[Waiting]()
    for _ in range(16):
        chosen = choose(turns, both)
        assert [each for each in chosen if each in others] == others, "in their order"
        assert len(chosen) == len(others) + at_once
        counts.update(chosen)
    assert {counts[each] for each in slow} == {at_once}


def test_those_that_come_and_go_are_not_forgotten() -> None:
    """A turn goes on behind the last one, also where that one has ended."""
    turns, slow = HostTurns(), [Waiting((0.0, i), [Costly(MAX_HOST_S)]) for i in range(4)]
    assert choose(turns, slow) == [slow[0]] and choose(turns, slow) == [slow[1]]
    del slow[1]
    assert choose(turns, slow) == [slow[1]]
    early = Waiting((-1.0, 0), [Costly(MAX_HOST_S)])
    assert choose(turns, [early, *slow]) == [slow[2]] and choose(turns, [early, *slow]) == [early]
