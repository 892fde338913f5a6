"""`PlanTiming`: when the plan after a running step leaves, on a GPU: as late as both workers still have it in time."""

from __future__ import annotations

from collections import defaultdict, deque

# Before the end of the running step: a plan takes about 1.5 ms to the first kernel of the attention worker, and steps
# of one size do not all take the same time.
LEAD_S = 0.002
# The part of that for a plan of a few streams alone that goes by a link: the attention worker has launched it after
# 0.9 ms, 1.3 in one of twenty. Who comes between the two moments makes the plan leave at once, with its prompt.
QUICK = 0.6
_MOST_LEAD_S = 0.02
_MORE, _LESS = 1.5, 0.99  # after a plan that came too late, and after each one in time
_NUM_KEPT = 3


class PlanTiming:
    """Predicts that a step takes as long as the fastest of the last ones with about as many tokens. For one thread.

    `lead_s`: how long before the predicted end a plan leaves.
    """

    def __init__(self) -> None:
        self.lead_s = LEAD_S
        self._durations = defaultdict[int, deque[float]](lambda: deque(maxlen=_NUM_KEPT))

    def add(self, num_tokens: int, duration_s: float) -> None:
        """A step has taken so long."""
        self._durations[_size_of(num_tokens)].append(duration_s)

    def leaves_at(self, num_tokens: int, begin_s: float, *, is_quick: bool = False) -> float:
        """When the plan after a step leaves that began at `begin_s`: at once if no step like it is known.

        `is_quick`: the plan is of a few streams alone, and goes by a link.
        """
        durations = self._durations.get(_size_of(num_tokens))
        lead_s = QUICK * self.lead_s if is_quick else self.lead_s
        return begin_s + min(durations) - lead_s if durations else begin_s

    def note(self, *, was_late: bool) -> None:
        """Whether a step ended before the plan that had waited for its end. Then the next ones wait less long.

        A plan that has not waited is in time, so that plans wait again after some that were late.
        """
        self.lead_s = min(self.lead_s * _MORE, _MOST_LEAD_S) if was_late else max(self.lead_s * _LESS, LEAD_S)


def _size_of(num_tokens: int) -> int:
    """The same for numbers that differ by less than an eighth."""
    shift = max(num_tokens.bit_length() - 4, 0)
    return num_tokens >> shift << shift
