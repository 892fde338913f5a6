"""What a parser finds in an answer, piece by piece: content, reasoning, and calls of tools.

These types know nothing of a client's protocol. Routes turn them into the objects of theirs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class ContentDelta:
    """Text for the user."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """Text of the model's reasoning, without its markers."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegin:
    """The beginning of call `index`, from 0, of the tool `name`. Later messages refer to `call_id`."""

    index: int
    call_id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A piece of the arguments of call `index`. All pieces together are one JSON object, unless the call is cut off."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    """The end of call `index`."""

    index: int
    malformed: str | None = None  # the text of a call with wrong arguments, or that the model left unfinished
    is_cut: bool = False  # a limit cut the answer off within the call: there is only the beginning of its arguments

    @property
    def is_complete(self) -> bool:
        return self.malformed is None and not self.is_cut


Delta = ContentDelta | ReasoningDelta | CallBegin | CallArguments | CallEnd


class Parser(Protocol):
    """Finds the deltas of one answer. However the text is divided, the deltas joined are the same."""

    def feed(self, text: str) -> list[Delta]:
        """The deltas that the next piece of text completes. Text that may begin a marker is held back."""

    def finish(self, is_cut: bool = False) -> list[Delta]:
        """The deltas of the text that was held back. Call it once, after the last piece.

        `is_cut`: a limit ended the answer, not the model. A call whose name is known then ends as it is.
        """
