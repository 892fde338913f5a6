"""`Suspects`: sequences that were running in several crashes of a worker in a row. Part of the scheduler.

They run one at a time, and nobody else meanwhile, each until it has a token: if a worker dies once more, the
gateway knows which of them it was.
"""

from __future__ import annotations

from services.dense_worker.engine.sequence import Sequence, SequenceStatus


class Suspects:
    """Live suspects, in the order in which they came."""

    def __init__(self) -> None:
        self._sequences: dict[int, Sequence] = {}  # by seq_id

    def add(self, sequence: Sequence) -> None:
        """Remembers a sequence if it is a suspect."""
        if sequence.is_suspect:
            self._sequences[sequence.seq_id] = sequence

    def clear(self, sequence: Sequence) -> None:
        """It has a token and the worker lives, or it is gone: no suspect any more."""
        if self._sequences:
            sequence.num_crashes = 0
            self._sequences.pop(sequence.seq_id, None)

    def open(self) -> Sequence | None:
        """The one that is OPENING or RUNNING: nobody else may run."""
        return next((each for each in self._sequences.values() if each.status is not SequenceStatus.WAITING), None)

    def first(self) -> Sequence | None:
        """The one to be opened next."""
        return next(iter(self._sequences.values()), None)
