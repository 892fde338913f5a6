"""`Acceptance`: how often guesses of a text's next token are right, as moving averages."""

from __future__ import annotations

from dataclasses import dataclass

_RATE = 1 / 8  # weight of the newest guess of a sequence
_TYPICAL_RATE = 1 / 128  # the same over all sequences, if most tokens have a guess


@dataclass(slots=True)
class Acceptance:
    """Probabilities that a guess is right: the first one at a new match, and those after a right guess."""

    first: float = 0.5
    later: float = 0.8
    typical: Acceptance | None = None  # of all sequences; learns from each guess, too
    rate: float = _TYPICAL_RATE  # weight of the newest guess

    def begin(self) -> Acceptance:
        """That of a new sequence, which begins with the typical one."""
        return Acceptance(self.first, self.later, self, _RATE)

    def observe(self, *, is_first: bool, is_right: bool) -> None:
        """Learns from a guess, whether it was a draft or only noted."""
        if is_first:
            self.first += self.rate * (is_right - self.first)
        else:
            self.later += self.rate * (is_right - self.later)
        if self.typical is not None:
            self.typical.observe(is_first=is_first, is_right=is_right)
