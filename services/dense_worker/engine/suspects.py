"""`Suspects`: sequences that were running in several consecutive crashes of a worker. Part of the scheduler.

They run one at a time without other sequences, each until it gets a token. If a worker dies again, the gateway knows
which sequence was the cause.
"""

from __future__ import annotations

from services.dense_worker.engine.sequence import Sequence, SequenceStatus


class Suspects:
    """Live suspects, in the order of arrival."""

    def __init__(self) -> None:
        self._sequences: dict[int, Sequence] = {}  # by seq_id

    def add(self, sequence: Sequence) -> None:
        """Remembers a sequence if it is a suspect."""
        if sequence.is_suspect:
            self._sequences[sequence.seq_id] = sequence

    def clear(self, sequence: Sequence) -> None:
        """Clears a sequence of suspicion: it got a token while the worker lives, or it has ended."""
        if self._sequences:
            sequence.num_crashes = 0
            self._sequences.pop(sequence.seq_id, None)

    def active(self) -> Sequence | None:
        """The suspect that is OPENING or RUNNING; no other sequence may run meanwhile."""
        return next((each for each in self._sequences.values() if each.status is not SequenceStatus.WAITING), None)

    def next_to_open(self) -> Sequence | None:
        """The suspect to open next."""
        return next(iter(self._sequences.values()), None)
