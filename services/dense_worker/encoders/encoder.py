"""`Encoder`: computes vectors of whole inputs, such as pictures. `EncodedKey` names what a sequence needs of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeVar

import torch


class EncoderInput(Protocol):
    """What an encoder reads. Equal hashes mean equal inputs."""

    @property
    def hash(self) -> str: ...


Input = TypeVar("Input", bound=EncoderInput)


class Encoded(NamedTuple):
    """The output for one input, in the model's dtype, on the encoder's device."""

    rows: torch.Tensor  # [num_rows, width]
    done: torch.cuda.Event | None = None  # when a GPU has computed it, on a stream of its own; None: it is there

    def on_stream(self) -> torch.Tensor:
        """The rows for the current stream, which waits for them; the host does not."""
        if self.done is not None:
            stream = torch.cuda.current_stream(self.rows.device)
            stream.wait_event(self.done)
            self.rows.record_stream(stream)
        return self.rows


class Encoder(Protocol[Input]):
    """Used on the engine thread."""

    def size(self, each: Input) -> int:
        """How many rows it computes for an input: what the budget of a run counts."""

    def output_bytes(self, each: Input) -> int:
        """The size of the output."""

    def encode(self, inputs: Sequence[Input]) -> list[Encoded]:
        """The outputs, all computed at once. Enqueues the work on a GPU, and does it on a CPU."""

    def is_busy(self) -> bool:
        """Whether a GPU still computes what was enqueued last."""

    def wait(self) -> None:
        """Waits until a GPU has computed what was enqueued last."""


class EncodedKey(NamedTuple):
    """What sequences with the same inputs wait for together; see `SequenceFeature.resource`."""

    encoder: str  # the name of its feature
    hashes: tuple[str, ...]  # of all inputs of the sequence, in order; may be there twice


@dataclass(slots=True)
class EncoderCounts:
    """What an encoder has done. Written on the engine thread; any thread may read it."""

    num_hits: int = 0  # inputs of sequences that entered the cache whose output was there
    num_encoded: int = 0  # inputs that were computed
    num_rows: int = 0  # that were computed
    num_bytes: int = 0  # of outputs that are kept now
