"""`WaitingQueue`: the order of sequences, their time limits, and the size of the queue. Part of the scheduler.

    order = arrival_s + priority · priority_ageing_s

The lowest order goes first; equal ones go in the order of arrival. For every `priority_ageing_s` of waiting, a sequence
gains one priority over newcomers. All sequences age at the same rate, so the order of two sequences never changes and a
sorted list suffices. Only sequences that arrive within `(priority - lowest priority) · priority_ageing_s` after a
sequence can overtake it. With priorities from -100 to 100 and 1 s that is at most 200 s, so no sequence starves.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Collection

from services.common.errors import CapacityError, QueueTimeout
from services.dense_worker.engine.sequence import Sequence, SequenceStatus

CHECK_INTERVAL_S = 0.25  # checking 10,000 sequences takes about 1 ms


class WaitingQueue:
    """Waiting sequences in order. The limits count only sequences that never ran: others cannot be refused."""

    def __init__(self, max_num_sequences: int, max_num_tokens: int, priority_ageing_s: float) -> None:
        self._max_num_sequences = max_num_sequences
        self._max_num_tokens = max_num_tokens  # tokens of their prompts
        self._priority_ageing_s = priority_ageing_s
        self._sequences: list[Sequence] = []
        self._num_new = 0  # number of waiting sequences that never ran
        self._num_new_tokens = 0  # tokens of the prompts of these
        self._next_check_s = 0.0  # next check for expired sequences, on the monotonic clock
        self._numbers = itertools.count()  # arrival numbers, so that no two sequences compare equal

    def __len__(self) -> int:
        return len(self._sequences)

    def admit(self, sequence: Sequence) -> None:
        """Sets the order of a new sequence. Raises `CapacityError` if the queue is full.

        The limit of tokens does not apply to an otherwise empty queue.
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
        """Adds an admitted sequence, for the first time or again."""
        sequence.status = SequenceStatus.WAITING
        insert(self._sequences, sequence)
        self._count(sequence, 1)

    def remove(self, sequence: Sequence) -> None:
        """Removes a sequence."""
        remove(self._sequences, sequence)
        self._count(sequence, -1)

    def first(self, preferred_seq_ids: Collection[int]) -> Sequence:
        """The first of the preferred sequences, or of all if no preferred one waits."""
        if preferred_seq_ids:
            for sequence in self._sequences:
                if sequence.seq_id in preferred_seq_ids:
                    return sequence
        return self._sequences[0]

    def expired(self, now_s: float) -> list[tuple[Sequence, QueueTimeout]]:
        """Sequences that have waited too long, with their errors. Checks only every `CHECK_INTERVAL_S`."""
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
        """Removes all sequences."""
        self._sequences.clear()
        self._num_new = self._num_new_tokens = 0

    def _count(self, sequence: Sequence, sign: int) -> None:
        if not sequence.has_started:
            self._num_new += sign
            self._num_new_tokens += sign * sequence.num_prompt_tokens


def insert(ordered: list[Sequence], sequence: Sequence) -> None:
    """Inserts a sequence at the position given by its order."""
    bisect.insort(ordered, sequence, key=_order)


def remove(ordered: list[Sequence], sequence: Sequence) -> None:
    """Removes a sequence from an ordered list by binary search."""
    index = bisect.bisect_left(ordered, sequence.order, key=_order)
    assert ordered[index] is sequence
    del ordered[index]


def _order(sequence: Sequence) -> tuple[float, int]:
    return sequence.order
