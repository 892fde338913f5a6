"""`TimeBudget`: how much time speculation may still lose. Part of the decision about drafts.

Estimates of what drafts bring can be wrong, and trials of what they cost are a loss at first. The budget bounds both by
what has really been measured, so that a server with speculation is never much slower than one without it.
"""

from __future__ import annotations

SHARE = 0.01  # of the time of decode steps that may be lost
MAX_STEPS = 8  # as many steps' time is there at the beginning, and usually at most
# As many may one step usually take from it: more is a pause of the machine rather than the fault of drafts.
MAX_LOSS_STEPS = 1.5


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
