"""`WaitingQueue`: who goes first, who waits too long, and how many may wait. Part of the scheduler.

    order = arrival_s + priority · priority_ageing_s

The lowest goes first, equals as they came. A sequence thus moves up against newcomers by one priority for every
`priority_ageing_s` it has waited: that both age alike is why the order of two never changes, and a sorted list
suffices. It is overtaken only by what arrives within `(priority - lowest priority) · priority_ageing_s` after it,
with priorities from -100 to 100 and 1 s within 200 s at the most: nobody starves.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Collection

from services.common.errors import CapacityError, QueueTimeout
from services.dense_worker.engine.sequence import Sequence, SequenceStatus

CHECK_INTERVAL_S = 0.25  # looking at 10,000 sequences takes about 1 ms


class WaitingQueue:
    """Waiting sequences in order. The limits count those that never ran: others cannot be sent away."""

    def __init__(self, max_num_sequences: int, max_num_tokens: int, priority_ageing_s: float) -> None:
        self._max_num_sequences = max_num_sequences
        self._max_num_tokens = max_num_tokens  # of prompts
        self._priority_ageing_s = priority_ageing_s
        self._sequences: list[Sequence] = []
        self._num_new = 0  # of them, those that never ran
        self._num_new_tokens = 0  # of their prompts
        self._next_check_s = 0.0  # of who waits too long, on the monotonic clock
        self._numbers = itertools.count()  # of arrivals; no two sequences compare equal

    def __len__(self) -> int:
        return len(self._sequences)

    def admit(self, sequence: Sequence) -> None:
        """Gives a new sequence its place in the order. Raises `CapacityError` when the queue is full.

        The limit of tokens never refuses the only one, however long it is.
        """
        if not sequence.has_started:
            if self._num_new >= self._max_num_sequences:
                raise CapacityError(f"{self._num_new} sequences are waiting, the limit is {self._max_num_sequences}")
            num_tokens = self._num_new_tokens + sequence.num_prompt_tokens
            if self._num_new and num_tokens > self._max_num_tokens:
                raise CapacityError(
                    f"with this prompt of {sequence.num_prompt_tokens} tokens {num_tokens} would be waiting, "
                    f"the limit is {self._max_num_tokens}"
                )
        sequence.order = sequence.arrival_s + sequence.priority * self._priority_ageing_s, next(self._numbers)

    def push(self, sequence: Sequence) -> None:
        """Lets an admitted sequence wait, for the first time or again."""
        sequence.status = SequenceStatus.WAITING
        insert(self._sequences, sequence)
        self._count(sequence, 1)

    def remove(self, sequence: Sequence) -> None:
        """It waits no longer."""
        remove(self._sequences, sequence)
        self._count(sequence, -1)

    def first(self, preferred_seq_ids: Collection[int]) -> Sequence:
        """The first of the preferred ones, or of all if none of them waits."""
        if preferred_seq_ids:
            for sequence in self._sequences:
                if sequence.seq_id in preferred_seq_ids:
                    return sequence
        return self._sequences[0]

    def expired(self, now_s: float) -> list[tuple[Sequence, QueueTimeout]]:
        """Those whose time is over, with the error to tell; looked for every `CHECK_INTERVAL_S`."""
        if now_s < self._next_check_s:
            return []
        self._next_check_s = now_s + CHECK_INTERVAL_S
        return [
            (sequence, QueueTimeout(f"waited {waited_s:.3f} s for the first step, the limit is {limit_s:g} s"))
            for sequence in self._sequences
            if (limit_s := sequence.queue_timeout_s) is not None
            and (waited_s := now_s - sequence.arrival_s) >= limit_s
            and not sequence.has_started
        ]

    def clear(self) -> None:
        """Forgets who waits."""
        self._sequences.clear()
        self._num_new = self._num_new_tokens = 0

    def _count(self, sequence: Sequence, sign: int) -> None:
        if not sequence.has_started:
            self._num_new += sign
            self._num_new_tokens += sign * sequence.num_prompt_tokens


def insert(ordered: list[Sequence], sequence: Sequence) -> None:
    """Puts a sequence where its order says."""
    bisect.insort(ordered, sequence, key=_order)


def remove(ordered: list[Sequence], sequence: Sequence) -> None:
    """Takes a sequence out of a list in order, without looking at all of it."""
    index = bisect.bisect_left(ordered, sequence.order, key=_order)
    assert ordered[index] is sequence
    del ordered[index]


def _order(sequence: Sequence) -> tuple[float, int]:
    return sequence.order
