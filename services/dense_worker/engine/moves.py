"""`Moves`: sequences leave a KV cache that is given up, one after the other. Part of the scheduler.

A sequence moves as one that is preempted comes back: it waits in its order and is opened in another cache, which copies
its blocks from the one that it leaves; what cannot be copied is computed again. The next one moves when that is done,
so that the streams share steps with the prompt of one sequence and not with those of all. A sequence stays where it is
as long as no other cache has room.
"""

from __future__ import annotations

from services.dense_worker.engine.fairness.admission import Admission
from services.dense_worker.engine.sequence import Sequence, SequenceStatus
from services.dense_worker.engine.session import Session


class Moves:
    """Of one attachment."""

    def __init__(self, session: Session, admission: Admission) -> None:
        self._session = session
        self._admission = admission
        self._moving: Sequence | None = None

    def go_on(self) -> None:
        """Lets the next sequence move, if the last one has arrived."""
        if self._moving is not None and not _has_arrived(self._moving):
            return
        self._moving = next((each for each in self._session.running if self._may_move(each)), None)
        if self._moving is not None:
            self._session.preempt(self._moving)
            self._moving.leaves_cache_id = self._moving.cache_id

    def is_empty(self, cache_id: int) -> bool:
        """Whether no sequence is in a cache, or about to be, and none copies from it."""
        if self._moving is not None and self._moving.leaves_cache_id == cache_id and not _is_there(self._moving):
            return False
        opening = (each.sequence for each in self._session.openings.values())
        return not any(cache_id in each.cache_ids for each in (*self._session.running, *opening))

    def _may_move(self, sequence: Sequence) -> bool:
        session = self._session
        return (
            sequence.divided is None  # one in several KV caches stays until it ends
            and sequence.cache_id in session.draining
            and sequence not in session.to_fork
            and self._admission.has_room_elsewhere(sequence)
        )


def _has_arrived(sequence: Sequence) -> bool:
    """Whether it goes on elsewhere, or has ended."""
    return _is_there(sequence) and (
        sequence.status is not SequenceStatus.RUNNING or sequence.num_remaining_tokens <= 1
    )


def _is_there(sequence: Sequence) -> bool:
    """Whether it has been opened elsewhere, or has ended."""
    return sequence.status in (SequenceStatus.RUNNING, SequenceStatus.FINISHED)
