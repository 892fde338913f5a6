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

    @property
    def is_computed(self) -> bool:
        """Whether a step can have the rows without waiting for a GPU."""
        return self.done is None or self.done.query()


class EncoderRun(Protocol):
    """A run is computed in parts, between which steps are run."""

    def advance(self) -> list[Encoded] | None:
        """Computes the next part, or enqueues it on a GPU; returns the outputs with the last one, else None."""


class Encoder(Protocol[Input]):
    """Used on the engine thread."""

    def size(self, each: Input) -> int:
        """How many rows it computes for an input: what the budget of a run counts."""

    def output_bytes(self, each: Input) -> int:
        """The size of the output."""

    def begin(self, inputs: Sequence[Input]) -> EncoderRun:
        """A run for these inputs, which are computed together. Nothing of it is computed yet."""


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
