"""`StepCosts`: what decode steps of this server cost, as measured while it runs, and `TimeBudget`: how much time
speculation may still lose. Parts of the decision about drafts.

A step that was planned while the one before ran costs the time between their ends. One that was planned afterwards
costs the host's time between them, too. The costs depend on the number of tokens; sizes are those of CUDA graphs.

On a machine with other work, all costs rise and fall together. The cost of steps planned ahead is always new, the
others may have been measured long before. So these are kept in proportion to it.

Estimates of what drafts bring can be wrong, and trials of what they cost are a loss at first. The budget bounds both by
what has really been measured, so that a server with speculation is never much slower than one without it.
"""

from __future__ import annotations

import statistics
from collections import deque

from services.common.batch_buckets import bucket_for, token_buckets

WINDOW = 9  # newest steps of a size and kind that count: the median
MIN_STEPS = 3  # before that a cost is unknown
# After so many further steps, of any kind, a cost is unknown again, by whether it is that of steps planned ahead. Such
# steps are measured again at no risk; to measure the others again is a trial that may lose time.
VALID_STEPS = {True: 256, False: 1024}
_TYPICAL_RATE = 1 / 1024  # weight of the newest cost in the typical one
SHARE = 0.01  # of the time of decode steps that may be lost
MAX_STEPS = 8  # as many steps' time is there at the beginning, and usually at most
# As many may one step usually take from it: more is a pause of the machine rather than the fault of drafts.
MAX_LOSS_STEPS = 1.5


class StepCosts:
    """Costs by number of tokens and by whether a step was planned ahead."""

    def __init__(self, max_num_seqs: int, max_num_tokens: int) -> None:
        self._sizes = token_buckets(max_num_seqs, max_num_tokens)
        self._recent: dict[tuple[int, bool], deque[float]] = {}
        self._costs: dict[tuple[int, bool], float | None] = {}
        self._measured_at: dict[tuple[int, bool], int] = {}  # number of the step that was measured last
        self._typical: dict[tuple[int, bool], float] = {}  # of steps planned ahead; changes slowly
        self._pace = 1.0  # cost of the newest steps planned ahead, as a multiple of the typical one of its size
        self._num_steps = 0

    def size_of(self, num_tokens: int) -> int:
        """Steps of so many tokens cost about as much as steps of this many."""
        return bucket_for(self._sizes, num_tokens) if num_tokens <= self._sizes[-1] else num_tokens

    def record(self, num_tokens: int, cost_s: float, *, is_ahead: bool) -> None:
        """Notes what a decode step has cost."""
        key = self.size_of(num_tokens), is_ahead
        self._num_steps += 1
        recent = self._recent.setdefault(key, deque(maxlen=WINDOW))
        if not self._is_valid(key):
            recent.clear()
        self._measured_at[key] = self._num_steps
        recent.append(cost_s if is_ahead else cost_s / self._pace)
        median_s = self._costs[key] = statistics.median(recent) if len(recent) >= MIN_STEPS else None
        if is_ahead and median_s is not None:
            typical_s = self._typical.get(key, median_s)
            self._typical[key] = typical_s + _TYPICAL_RATE * (median_s - typical_s)
            self._pace = median_s / self._typical[key]

    def cost(self, num_tokens: int, *, is_ahead: bool) -> float | None:
        """The cost in seconds; None if it is unknown."""
        key = self.size_of(num_tokens), is_ahead
        cost_s = self._costs.get(key) if self._is_valid(key) else None
        return cost_s if is_ahead or cost_s is None else cost_s * self._pace

    def _is_valid(self, key: tuple[int, bool]) -> bool:
        return self._num_steps - self._measured_at.get(key, 0) < VALID_STEPS[key[1]]


class TimeBudget:
    """Time to lose, in steps of the present size that are planned ahead.

    Gains fill it up, too, but only to its limit: so they do not pay for long losses later.
    """

    def __init__(self, max_num_steps: float = MAX_STEPS, max_loss_steps: float = MAX_LOSS_STEPS) -> None:
        """max_num_steps: that can be saved; max_loss_steps: that one step may take from it"""
        self._max_num_steps, self._max_loss_steps = max_num_steps, max_loss_steps
        self._num_steps = float(MAX_STEPS)
        self._step_s: float | None = None  # None before the first step

    @property
    def is_spent(self) -> bool:
        """Whether nothing may be lost now."""
        return self._num_steps <= 0.0

    def add_step(self, ahead_s: float, gain_s: float) -> None:
        """A decode step has ended.

        ahead_s: what such a step costs without drafts, if it is planned ahead; gain_s: how much less time its tokens
        have cost than they would have cost in such steps; below 0 it is a loss
        """
        self._step_s = ahead_s
        gain = max(gain_s / ahead_s, -self._max_loss_steps)
        self._num_steps = min(self._num_steps + SHARE + gain, self._max_num_steps)

    def spend(self, seconds: float) -> None:
        """Time was lost in another way."""
        if self._step_s is not None:
            self._num_steps -= min(seconds / self._step_s, self._max_loss_steps)
