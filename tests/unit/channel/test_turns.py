"""Steps that run by turns on one thread."""

from __future__ import annotations

import weakref
from collections.abc import Iterator

from services.channel import Flag
from services.channel.turns import Turn, Turns


class _ReadyChannel:
    """A peer that is never waited for."""

    waited_s, wait_timeout_s = 0.0, 1.0

    def has_signal(self, flag: Flag) -> bool:
        return True


class _Running:
    """A step that others come after."""

    def __init__(self, turn: Turn) -> None:
        self._turn = turn

    def is_done(self) -> bool:
        return self._turn.is_done


def _step() -> Iterator[Flag]:
    yield Flag.ATTENTION_READY


def test_a_step_that_comes_after_another_does_not_keep_it_once_it_has_begun() -> None:
    turns, lanes = Turns(), (_ReadyChannel(), _ReadyChannel())
    newest = Turn(lanes[0], _step())
    turns.add(newest)
    first = weakref.ref(newest)
    for number in range(1, 4):  # each has blocks that the one before it may have used
        newest = Turn(lanes[number % 2], _step(), (_Running(newest),))
        turns.add(newest)
    while turns.go_on():
        pass
    assert newest.is_done
    assert first() is None, "the newest step holds all steps that have ever run"
