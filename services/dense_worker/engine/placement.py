"""`Placement`: which of several attention workers' KV caches a sequence is opened in. Part of the scheduler."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import Protocol

from services.dense_worker.engine.sequence import Sequence
from services.dense_worker.engine.session import Session


class Placement(Protocol):
    """Chooses for sequences that hold nothing and share nothing that they must stay with. Engine thread."""

    def choose(self, sequence: Sequence, fitting: SequenceOf[int], session: Session) -> int:
        """One of `fitting`, the cache_ids that have room for the sequence now; there is at least one."""

    def note(self, sequence: Sequence) -> None:
        """A sequence will be opened in the cache that it names."""

    def forget(self, cache_id: int) -> None:
        """A KV cache is gone."""


class OnlyPlacement:
    """There is one attention worker."""

    def choose(self, sequence: Sequence, fitting: SequenceOf[int], session: Session) -> int:
        return fitting[0]

    def note(self, sequence: Sequence) -> None:
        pass

    def forget(self, cache_id: int) -> None:
        pass
