"""`Acceptance`: how often drafts of a text's next token are right, as moving averages."""

from __future__ import annotations

from dataclasses import dataclass

_RATE = 1 / 8  # weight of the newest draft of a sequence
_TYPICAL_RATE = 1 / 128  # the same over all sequences, if most tokens have a draft


@dataclass(slots=True)
class Acceptance:
    """Probabilities that a draft is right: the first one at a new match, and those after a right one."""

    first: float = 0.5
    later: float = 0.8
    typical: Acceptance | None = None  # of all sequences; learns from each draft, too
    rate: float = _TYPICAL_RATE  # weight of the newest draft

    def begin(self) -> Acceptance:
        """That of a new sequence, which begins with the typical one."""
        return Acceptance(self.first, self.later, self, _RATE)

    def observe(self, *, is_first: bool, is_right: bool) -> None:
        """Learns from a draft, whether a step had it or it was only noted."""
        if is_first:
            self.first += self.rate * (is_right - self.first)
        else:
            self.later += self.rate * (is_right - self.later)
        if self.typical is not None:
            self.typical.observe(is_first=is_first, is_right=is_right)
