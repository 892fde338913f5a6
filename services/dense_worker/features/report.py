"""`Report`: what a feature tells a client about tokens of its sequence, besides the tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from services.pb import dense_pb2

MAX_PART_BYTES = 2**20  # about, of a part with several values


class Report(Protocol):
    """Made on the engine thread by `StepPart.read`, and sent on the event loop before the step's tokens."""

    seq_id: int

    def encode(self) -> Iterator[tuple[dense_pb2.StepOutput, int]]:
        """Parts of messages, and about how many bytes each has. A part may have a single value of any size."""
