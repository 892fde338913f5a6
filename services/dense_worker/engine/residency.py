"""`Residency`: how sequences enter and leave the KV cache. Part of the scheduler."""

from __future__ import annotations

from services.dense_worker.engine.sequence import Sequence, SequenceStatus
from services.dense_worker.engine.session import Session
from services.dense_worker.engine.waiting_queue import WaitingQueue


class Residency:
    """Of one attachment. Whoever decides that a sequence has to go, scheduler, turns or planner, says so here."""

    def __init__(self, session: Session, waiting: WaitingQueue) -> None:
        self._session = session
        self._waiting = waiting
        self.last_step_id = 0  # of the newest plan, which may still run what leaves now
        self.num_preemptions = 0

    def wait(self, sequence: Sequence) -> None:
        """A sequence waits, for the first time or again."""
        missing = [each.resource for each in sequence.features if not each.is_ready]
        self._waiting.push(sequence, missing)
        if sequence.policy is not None:
            sequence.policy.leave_cache()
            held = self._session.orphaned_blocks.keys() - {sequence.seq_id}  # rows from before the attachment
            self._session.close_orphaned(held & set(sequence.policy.seq_ids))

    def enter(self, sequence: Sequence) -> None:
        """A sequence is in the KV cache, or will be forked into it: steps may run it."""
        sequence.status = SequenceStatus.RUNNING
        self._session.add(sequence)

    def leave(self, sequence: Sequence) -> None:
        """A running sequence ends: the next plan closes it."""
        self._session.remove(sequence)
        self.close(sequence)

    def close(self, sequence: Sequence) -> None:
        """The next plan closes a sequence that no step runs any more."""
        self._session.close(sequence)
        for feature in sequence.features:
            feature.leave(self.last_step_id)

    def preempt(self, victim: Sequence) -> None:
        """A running sequence gives up its blocks, and waits again."""
        for step in self._session.in_flight:
            step.published.left.setdefault(victim, victim.cache_ids)
        self.leave(victim)
        self.wait(victim)
        self.num_preemptions += 1

    def drop_orphaned_blocks(self) -> None:
        """Gives up the blocks that the last waiting sequence holds from before; it will be computed again."""
        session = self._session
        waiting = {each.seq_id: each for each in self._waiting if each.seq_id in session.orphaned_blocks}
        if waiting:
            session.close_orphaned([max(waiting, key=lambda seq_id: waiting[seq_id].order)])
