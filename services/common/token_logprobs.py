"""`TokenLogprobs`: the log-probabilities that a request gets for one token. `LogprobRows`: those of many tokens."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import overload

import numpy as np

from services.pb import sampling_pb2

_FIRST, _SECOND = itemgetter(0), itemgetter(1)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural logarithms of the model's own probabilities, before any sampling option; see `sampled_logprobs`."""

    logprob: float  # of the sampled token, or of the prompt's token
    # (token_id, logprob) of the most likely tokens, most likely first; then of `SamplingParams.logprob_token_ids`
    top: tuple[tuple[int, float], ...]
    rank: int | None = None  # how many tokens are at least as likely as this one, itself included; None: not counted


def encode_logprobs(value: TokenLogprobs) -> sampling_pb2.TokenLogprobs:
    """Converts to the message of `protos/sampling.proto`."""
    return sampling_pb2.TokenLogprobs(
        logprob=value.logprob,
        top_token_ids=[token_id for token_id, _ in value.top],
        top_logprobs=[logprob for _, logprob in value.top],
        rank=value.rank,
    )


def decode_logprobs(message: sampling_pb2.TokenLogprobs) -> TokenLogprobs:
    """Converts from the message of `protos/sampling.proto`."""
    top = tuple(zip(message.top_token_ids, message.top_logprobs, strict=True))
    return TokenLogprobs(message.logprob, top, message.rank if message.HasField("rank") else None)


def encode_rows(values: Sequence[TokenLogprobs], made: dict[int, bytes] | None = None) -> bytes:
    """Converts to the rows of `protos/prompt_logprobs.proto`. All have as many likely tokens.

    `made`: keeps the row of each value by its `id`, for sequences that have values in common and live as long.
    """
    made = {} if made is None else made
    num_top = len(values[0].top) if values else 0
    pack, rows = struct.Struct(f"<fI{num_top}I{num_top}f").pack, []
    for each in values:
        row = made.get(id(each))
        if row is None:
            row = made[id(each)] = pack(each.logprob, each.rank or 0, *map(_FIRST, each.top), *map(_SECOND, each.top))
        rows.append(row)
    return b"".join(rows)


class LogprobRows(Sequence[TokenLogprobs]):
    """The log-probabilities of consecutive tokens, in arrays: 12 bytes for each token and 8 for each likely one.

    Its elements are made when they are asked for; as objects they would take thirty times as much.
    """

    __slots__ = ("_ends", "_ranks", "_top_logprobs", "_top_token_ids", "own")

    def __init__(self) -> None:
        self.own = array("f")  # of the tokens themselves
        self._ranks = array("I")  # 0: not counted
        self._ends = array("I")  # of each token's part of the arrays below
        self._top_token_ids = array("I")
        self._top_logprobs = array("f")

    @property
    def num_values(self) -> int:
        """The number of log-probabilities."""
        return len(self.own) + len(self._top_logprobs)

    def append(self, message: sampling_pb2.TokenLogprobs) -> None:
        """Adds those of the next token."""
        self.own.append(message.logprob)
        self._ranks.append(message.rank)  # 0 if the message has none
        self._top_token_ids.extend(message.top_token_ids)
        self._top_logprobs.extend(message.top_logprobs)
        self._ends.append(len(self._top_logprobs))

    def extend_encoded(self, values: bytes, num_tokens: int, num_known: int = 0) -> None:
        """Adds those of further tokens: the rows of `encode_rows`, of so many tokens, without the first `num_known`."""
        rows = np.frombuffer(values, "<u4").reshape(num_tokens, -1)[num_known:]
        start, num_rows, num_top = len(self._top_logprobs), len(rows), (rows.shape[1] - 2) // 2
        ends = start + num_top * np.arange(1, num_rows + 1, dtype="<u4")
        columns = rows[:, 0], rows[:, 1], ends, rows[:, 2 : 2 + num_top], rows[:, 2 + num_top :]
        arrays = (self.own, self._ranks, self._ends, self._top_token_ids, self._top_logprobs)
        for target, column in zip(arrays, columns, strict=True):
            target.frombytes(column.tobytes())

    def extend(self, rows: LogprobRows) -> None:
        """Adds those of further tokens."""
        offset = len(self._top_logprobs)
        self.own.extend(rows.own)
        self._ranks.extend(rows._ranks)
        self._ends.extend(rows._ends if not offset else array("I", [offset + end for end in rows._ends]))
        self._top_token_ids.extend(rows._top_token_ids)
        self._top_logprobs.extend(rows._top_logprobs)

    def __len__(self) -> int:
        return len(self.own)

    @overload
    def __getitem__(self, index: int) -> TokenLogprobs: ...
    @overload
    def __getitem__(self, index: slice) -> LogprobRows: ...
    def __getitem__(self, index: int | slice) -> TokenLogprobs | LogprobRows:
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self.own))
            if step != 1:
                raise ValueError(f"the step of a slice is {step}, must be 1")
            return self._slice(start, max(start, stop))
        if not -len(self.own) <= index < len(self.own):
            raise IndexError(index)
        return self._row(index % len(self.own))

    def __iter__(self) -> Iterator[TokenLogprobs]:
        return map(self._row, range(len(self.own)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    def encoded(self) -> Iterator[sampling_pb2.TokenLogprobs]:
        """The messages of `encode_logprobs`, one by one. A row may have a whole vocabulary, which is no objects here.
        """
        for index, end in enumerate(self._ends):
            start = self._start(index)
            yield sampling_pb2.TokenLogprobs(
                logprob=self.own[index],
                top_token_ids=self._top_token_ids[start:end],
                top_logprobs=self._top_logprobs[start:end],
                rank=self._ranks[index] or None,
            )

    def _row(self, index: int) -> TokenLogprobs:
        start, end = self._start(index), self._ends[index]
        top = tuple(zip(self._top_token_ids[start:end], self._top_logprobs[start:end], strict=True))
        return TokenLogprobs(self.own[index], top, self._ranks[index] or None)

    def _slice(self, start: int, stop: int) -> LogprobRows:
        rows, first, last = LogprobRows(), self._start(start), self._start(stop)
        rows.own, rows._ranks = self.own[start:stop], self._ranks[start:stop]
        rows._ends = array("I", [end - first for end in self._ends[start:stop]]) if first else self._ends[start:stop]
        rows._top_token_ids, rows._top_logprobs = self._top_token_ids[first:last], self._top_logprobs[first:last]
        return rows

    def _start(self, index: int) -> int:
        return self._ends[index - 1] if index else 0
