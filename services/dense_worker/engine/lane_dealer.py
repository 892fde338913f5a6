"""`LaneDealer`: which sequences are in which lane, where several micro-batches are in flight at a time. Engine thread.

A sequence stays in its lane, in which its tokens are fed from step to step. So both strokes of all lanes should take
about equally long: the dense stroke by rows, attention by tokens of context.
"""

from __future__ import annotations

from services.dense_worker.engine.decode_rows import DecodeRows
from services.dense_worker.engine.sequence import Sequence

_MOST_DRIFT = 1.25  # of the sum of the two largest shares, which is 1 for two lanes that are even
_NO_LANE = -1  # of a row that is in no plan, since it moves


class LaneDealer:
    """Deals running sequences to lanes, and moves some when the lanes have drifted apart.

    A step of all lanes takes as long as their longest strokes. So what counts is the largest part of all rows that a
    lane has, plus the largest part of all tokens: together 2 / num_lanes at best.
    """

    def __init__(self, num_lanes: int) -> None:
        self._num_rows = [0] * num_lanes
        self._num_tokens = [0] * num_lanes
        self._loads: dict[Sequence, tuple[int, int]] = {}  # rows and tokens, as they were when it was dealt
        self._is_settled = True  # nothing can be mended since the last sequence came or went
        self._moving: tuple[Sequence, int] | None = None  # to which lane; its last step may be under way

    @property
    def num_lanes(self) -> int:
        return len(self._num_rows)

    def enter(self, sequence: Sequence) -> None:
        """Gives a lane to a sequence."""
        if self.num_lanes > 1:
            load = sequence.num_rows, sequence.num_tokens
            sequence.lane = min(range(self.num_lanes), key=lambda lane: self._unevenness_with(load, lane))
            self._count(sequence, load)

    def leave(self, sequence: Sequence) -> None:
        """A sequence runs no more."""
        if self.num_lanes > 1:
            self._discount(sequence)
            if self._moving is not None and self._moving[0] is sequence:
                self._moving = None

    def begin_move(self, rows: DecodeRows) -> None:
        """If the lanes have drifted apart, takes a sequence out of the plans of its lane. One at a time.

        Only sequences with a row and without features move.
        """
        if self._moving is not None or self._is_settled:
            return
        self._is_settled = True
        unevenness = self._unevenness_with((0, 0), 0)
        if unevenness <= _MOST_DRIFT * 2 / self.num_lanes:
            return
        full = self._num_rows.index(max(self._num_rows)), self._num_tokens.index(max(self._num_tokens))
        moves = [
            (self._unevenness_with(load, target, source=sequence.lane), sequence, target)
            for sequence, load in self._loads.items()
            if sequence.lane in full and sequence.slot is not None and not sequence.features
            for target in range(self.num_lanes)
            if target != sequence.lane
        ]
        least, sequence, target = min(moves, key=lambda move: move[0], default=(unevenness, None, 0))
        if sequence is not None and least < unevenness:
            self._moving = sequence, target
            rows.lanes[sequence.slot] = _NO_LANE

    def end_move(self, rows: DecodeRows) -> tuple[Sequence, int] | None:
        """The sequence that moves now, since no step with it is under way, and the lane that it has left. Or None."""
        if self._moving is None or self._moving[0].num_pending_tokens:
            return None
        (sequence, target), self._moving = self._moving, None
        assert sequence.slot is not None, "a sequence that leaves its row leaves the dealer, too"
        source, load = sequence.lane, self._loads[sequence]
        self._discount(sequence)
        sequence.lane = target
        self._count(sequence, load)
        rows.lanes[sequence.slot] = target
        return sequence, source

    def _unevenness_with(self, load: tuple[int, int], target: int, source: int | None = None) -> float:
        """The two largest shares, together, when this load is in `target`, and in `source` no more."""
        total = 0.0
        for counts, count in zip((self._num_rows, self._num_tokens), load, strict=True):
            changed = list(counts)
            changed[target] += count
            if source is not None:
                changed[source] -= count
            total += max(changed) / max(1, sum(changed))
        return total

    def _count(self, sequence: Sequence, load: tuple[int, int]) -> None:
        self._is_settled = False
        self._loads[sequence] = load
        self._num_rows[sequence.lane] += load[0]
        self._num_tokens[sequence.lane] += load[1]

    def _discount(self, sequence: Sequence) -> None:
        self._is_settled = False
        num_rows, num_tokens = self._loads.pop(sequence)
        self._num_rows[sequence.lane] -= num_rows
        self._num_tokens[sequence.lane] -= num_tokens
