"""`HostTurns`: which sequences are in a step if those that need a token would take the host too long."""

from __future__ import annotations

from services.dense_worker.engine.sequence import Sequence

MAX_HOST_S = 0.02  # what slow sequences of a step may take of the host in all; one of them may always run
SLOW_S = 0.0005  # a sequence that takes less is in each step


class HostTurns:
    """All sequences of a step wait for the host. So those that take long take turns, and delay each other alone."""

    def __init__(self) -> None:
        self._last: tuple[float, int] | None = None  # the order of the last slow one that had its turn

    def choose(self, sequences: list[Sequence]) -> list[Sequence]:
        """Those that are in the next step, in their order."""
        costs = {each: host_s for each in sequences if (host_s := _host_s(each)) > SLOW_S}
        if sum(costs.values()) <= MAX_HOST_S:
            return sequences
        slow = sorted(costs, key=lambda each: each.order)
        if (last := self._last) is not None:
            slow.sort(key=lambda each: each.order <= last)  # those behind the last one come first
        left_s, chosen = MAX_HOST_S, set[Sequence]()
        for each in slow:
            if chosen and costs[each] > left_s:
                break
            left_s -= costs[each]
            chosen.add(each)
            self._last = each.order
        return [each for each in sequences if each not in costs or each in chosen]


def _host_s(sequence: Sequence) -> float:
    return sum([feature.host_s for feature in sequence.features])
