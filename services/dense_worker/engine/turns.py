"""`Turns`: sequences take turns in the KV cache, while host memory keeps the blocks of those that wait.

Part of the scheduler. A sequence that runs has blocks for `turn_tokens` more tokens. When it has begun the last of
them, it is decided whether it gets as many again, or leaves when they are full: if there are too few, or one waits that
comes before it. Until then its other blocks are copied to the host tier. So more sequences advance than the cache
holds, all about as fast, instead of the first ones alone and then the last ones in steps of a few.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator

from services.dense_worker.engine.sequence import Sequence, SequenceStatus
from services.dense_worker.engine.session import Session
from services.dense_worker.engine.waiting_queue import TURN_S_PER_TOKEN


class Turns:
    """Of one attachment, in a single KV cache."""

    def __init__(self, session: Session, turn_tokens: int) -> None:
        self._session = session
        self._waiting = session.waiting
        self._turn_tokens = turn_tokens
        self._margin_s = TURN_S_PER_TOKEN * turn_tokens / 2  # or sequences that are as far would change places
        # Blocks that sequences which have begun may get, in the cache and in host memory together.
        self._promised: dict[Sequence, int] = {}
        self._num_unpromised = sum(each.num_blocks + each.num_host_blocks for each in session.attachment.caches)
        self._leaving = set[Sequence]()  # running ones that leave at the end of their turn
        self._left: dict[Sequence, int] = {}  # the blocks of those that have left, until they are free

    def may_begin(self, sequence: Sequence, most_blocks: int) -> bool:
        """Whether a sequence has begun, or cache and host memory have room for the most blocks that it may hold."""
        return sequence in self._promised or most_blocks <= self._num_unpromised

    def begin(self, sequence: Sequence, most_blocks: int) -> None:
        """A sequence is opened, for the first time or again."""
        self._leaving.discard(sequence)  # it was preempted before the end of its turn
        if sequence not in self._promised:
            self._promised[sequence] = most_blocks
            self._num_unpromised -= most_blocks

    def forget(self, sequence: Sequence) -> None:
        """A sequence has ended, perhaps before it has begun; or it is parked, and will begin again."""
        self._num_unpromised += self._promised.pop(sequence, 0)
        self._leaving.discard(sequence)
        self._left.pop(sequence, None)

    def waiting(self) -> list[Sequence]:
        """The sequences that have begun and wait, in order."""
        return sorted((each for each in self._promised if each.status is SequenceStatus.WAITING), key=_order)

    def go_on(
        self, most_blocks: Callable[[Sequence], int], num_needed: Callable[[Sequence], int], num_places: int
    ) -> None:
        """Decides for sequences in the last block of their turn, and ends the turns that are over.

        `most_blocks`: that a sequence may hold; `num_needed`: those that a waiting one must have to be opened;
        `num_places`: that are free
        """
        if not (last := self._in_last_block()):
            return
        session, order_of = self._session, self._waiting.order_after_turn
        ledger = session.ledger
        undecided = sorted(set(last).difference(self._leaving), key=order_of, reverse=True)
        self._decide(undecided, most_blocks, num_needed, num_places)
        for sequence in last:
            is_full = sequence.num_computed_tokens >= sequence.num_blocks * ledger.block_size
            is_known = sequence.num_pending_tokens <= 1  # all tokens in its blocks, by which these are found again
            if is_full and is_known and not sequence.num_reserved_blocks:
                self._leaving.discard(sequence)
                self._left[sequence] = sequence.num_blocks
                session.end_turn(sequence, order_of(sequence))

    def _decide(
        self,
        sequences: list[Sequence],
        most_blocks: Callable[[Sequence], int],
        num_needed: Callable[[Sequence], int],
        num_places: int,
    ) -> None:
        """Gives sequences, those that are farthest first, blocks for another turn, or has them leave."""
        session, ledger = self._session, self._session.ledger
        self._left = {each: num for each, num in self._left.items() if each.seq_id in session.closing}
        num_left = ledger.num_available_blocks + sum(self._left.values())
        num_left += sum(each.num_blocks for each in self._leaving)
        num_places += len(self._leaving) + sum(len(lane.to_close_later) for lane in session.lanes)
        candidates = heapq.merge(self.waiting(), self._newcomers(most_blocks), key=_order)
        candidate = next(candidates, None)
        for sequence in sequences:
            while candidate is not None and candidate.num_rows <= num_places:
                if (needed := num_needed(candidate)) > num_left:
                    break
                num_left -= needed  # it gets what is there, or will be
                num_places -= candidate.num_rows
                candidate = next(candidates, None)
            order_s, _ = self._waiting.order_after_turn(sequence)
            gives_way = candidate is not None and candidate.order[0] + self._margin_s < order_s
            num_more = min(ledger.blocks_for(self._turn_tokens), most_blocks(sequence) - sequence.num_blocks)
            if gives_way or num_more > num_left:
                self._leaving.add(sequence)
                session.keep_copies(sequence)
                num_left += sequence.num_blocks
                num_places += 1
            elif num_more <= ledger.num_available_blocks:  # otherwise the blocks are on their way
                session.reserve(sequence, num_more)
                num_left -= num_more

    def _in_last_block(self) -> list[Sequence]:
        """The sequences that have no block reserved, and will need some."""
        session, rows, size = self._session, self._session.rows, self._session.ledger.block_size
        slots = rows.unfinished()
        slots = slots[(rows.num_reserved[slots] == 0) & (rows.ends[slots] > rows.num_blocks[slots] * size)]
        others = [
            each
            for each in session.others
            if not (each.num_reserved_blocks or each.num_draft_tokens or each in session.to_fork)
            and each.policy is None
            and each.num_remaining_tokens == 1
            and each.max_num_cached_tokens > each.num_blocks * size
        ]
        return [*rows.sequences[slots].tolist(), *others]

    def _newcomers(self, most_blocks: Callable[[Sequence], int]) -> Iterator[Sequence]:
        """The waiting sequences that may begin, in order."""
        num_left = self._num_unpromised
        for sequence in self._waiting.in_order():
            if sequence not in self._promised:
                num_left -= most_blocks(sequence)
                if num_left < 0:
                    return
                yield sequence


def _order(sequence: Sequence) -> tuple[float, int]:
    return sequence.order
