"""`Report`: a feature that tells something of a sequence's tokens. `ReportRecord`: what has arrived of it.

Nothing between the feature in the dense worker and this one reads a report: wire, journal and chunks carry it by name.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from services.gateway.features.feature import Feature
from services.pb import gateway_pb2
from services.step.sequence_spec import SequenceSpec

# The messages of gRPC that have places for reports.
AnswerMessage = gateway_pb2.GenerateChunk | gateway_pb2.Completion | gateway_pb2.PromptEcho


class ReportPart(Protocol):
    """What a chunk shows of a report."""

    @property
    def num_values(self) -> int:
        """Encoding it takes as long as about so many numbers and texts."""


class JsonPieces:
    """A list that may be large: then it becomes JSON piece by piece. Iterated over, it gives its elements.

    No dataclass: encoded at once, that would be an object with its fields.
    """

    def __iter__(self) -> Iterator[Any]:
        raise NotImplementedError

    def json_pieces(self) -> Iterator[bytes]:
        """The JSON. One piece takes less than a millisecond."""
        raise NotImplementedError


class Reporter(Protocol):
    """The sequence that reports, as the journal knows it."""

    spec: SequenceSpec
    num_cached_tokens: int  # of the prompt, found in the prefix cache
    arrival: float  # on the monotonic clock
    queue_s: float | None  # from the arrival until it first ran


class ReportRecord:
    """What has arrived of one report of one sequence. After a worker has died, rows may arrive again."""

    @property
    def num_reported(self) -> int:
        """Index after the last token whose row has arrived: see `Submit.num_reported`."""
        raise NotImplementedError

    def keep(self, start: int, num_tokens: int, values: bytes) -> bool:
        """Stores the rows of tokens from index `start` on. Whether the client is to be told before the next token."""
        raise NotImplementedError

    def take(self, reporter: Reporter, num_tokens: int, is_last: bool) -> ReportPart | None:
        """What the next chunk shows of it; None: nothing. The chunk has so many tokens, and `is_last` of its answer.

        If the report `is_shown_with_prompt`: what the chunk with the prompt shows, which is asked for once.
        """
        raise NotImplementedError


class Report(Feature):
    """Its parts are in `Chunk.reports` and `Completion.reports`, or in `Prompt.reports`, by its name."""

    is_shown_with_prompt: bool = False  # in `Prompt.reports`; then the request shows its prompt, and needs no output
    is_in_grpc: bool = True  # `write` has a place in the messages of gRPC

    def record(self, spec: SequenceSpec, *, may_be_cut: bool) -> ReportRecord:
        """For a sequence that reports it. `may_be_cut`: its answer may end before the last token that arrives."""
        raise NotImplementedError

    def write(self, parts: Sequence[Any], message: AnswerMessage) -> None:
        """Writes what `take` has given, in order, into a message of gRPC."""
        raise NotImplementedError

    def json(self, parts: Sequence[Any], num_prompt_tokens: int) -> Any:
        """What the answer over HTTP has of them, under the name of the report. Without parts an abort came first."""
        raise NotImplementedError
