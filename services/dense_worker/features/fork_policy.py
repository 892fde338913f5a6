"""`ForkPolicy`: which sequences are not opened, but forked from running ones. Part of the scheduler."""

from __future__ import annotations

from services.dense_worker.engine.plan_builder import PlanBuilder
from services.dense_worker.engine.sequence import Sequence
from services.dense_worker.engine.session import Session


class ForkPolicy:
    """Of all sequences of a worker: every one is opened. Subclasses fork some. Engine thread.

    A sequence that will be forked is RUNNING from its turn on, with its places and blocks, and is part of
    `Session.to_fork` until it gets its first row.
    """

    def add(self, sequence: Sequence) -> None:
        """A new sequence waits."""

    def remove(self, sequence: Sequence) -> None:
        """A sequence has ended."""

    def num_shared_blocks(self, sequence: Sequence, session: Session) -> int:
        """The blocks that a waiting sequence need not be promised, because it would share them."""
        return 0

    def source_of(self, sequence: Sequence, session: Session) -> Sequence | None:
        """The sequence from which a waiting one would be forked, if its KV cache has room; None: it is opened."""
        return None

    def takes(self, sequence: Sequence, session: Session) -> bool:
        """Whether a sequence that has its turn will be forked; then it is part of `Session.to_fork` from now on.

        Only in the KV cache that it names: beside a full one it is opened in another.
        """
        return False

    def plan(self, step: PlanBuilder, session: Session) -> list[Sequence]:
        """Adds forks and the first rows of what is forked to a step. Returns those that cannot be forked any more."""
        return []
