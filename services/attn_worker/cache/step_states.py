"""`StepStates`: the recurrent states that a step reads and writes in gated delta layers, as slots.

Built by `StateGroup.describe` without torch, read once by the backend's `begin_step`.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class StateWave:
    """Parts of a step's sequences that can run at once, one list element for each."""

    first_rows: list[int] = field(default_factory=list)  # of the step's rows, as in `StepMetadata`
    num_tokens: list[int] = field(default_factory=list)  # rows of the part
    sources: list[int] = field(default_factory=list)  # slot that holds the state before
    targets: list[int] = field(default_factory=list)  # slot for the state after

    def add(self, first_row: int, num_tokens: int, source: int, target: int) -> None:
        """Adds the part of a sequence."""
        self.first_rows.append(first_row)
        self.num_tokens.append(num_tokens)
        self.sources.append(source)
        self.targets.append(target)


@dataclass(frozen=True, slots=True)
class StepStates:
    """A step in gated delta layers: waves that run one after the other, all rows together.

    The first wave has a part of each sequence of the step. A later one starts from states that the wave before has
    written, for sequences that leave a state within their tokens.

    Two slots belong to no sequence. Slot `num_slots`, the null slot, takes what sequences that cannot run leave. Slot
    `num_slots + 1`, the zero slot, is the state before a first token, and is never written.
    """

    waves: tuple[StateWave, ...] = field(default_factory=lambda: (StateWave(),))


def null_slot(num_slots: int) -> int:
    """The slot that is written for nobody, of `num_slots` and two more."""
    return num_slots


def zero_slot(num_slots: int) -> int:
    """The slot that is always zero."""
    return num_slots + 1
