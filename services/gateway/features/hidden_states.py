"""Hidden states: the last one of each token that is computed, after the final norm. SGLang has them.

Of answers that show just the state of their last token no other one is kept, and none of the prompt is sent.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from pydantic import Field
from pydantic_core import to_json

from services.common.errors import InvalidRequest
from services.gateway.features.feature import WITH_HIDDEN_STATES, HeldBytes, RequestSize
from services.gateway.features.report import JsonPieces, Report, Reporter, ReportRecord
from services.gateway.features.token_rows import BYTES_PER_VALUE as BYTES_PER_KEPT_VALUE
from services.gateway.features.token_rows import RowRecord, TokenRows
from services.pb import gateway_pb2
from services.step.sequence_spec import SequenceSpec

BYTES_PER_VALUE = 56  # twice as a 32-bit float and twice as JSON, at most 24 bytes
OF_ANSWER = b"answer"  # asks the dense worker for those of the answer's tokens alone; b"": all
NUM_LAST_ROWS = 65  # of which one is the last that counts: the others may be of 64 tokens that were drafted in vain


class HiddenStatesList(JsonPieces):
    """SGLang's list: a list of the rows of the prompt, then one row for each token of the answer but the last one.

    None stands in place of a value that is no number, as JSON has none for it.
    """

    def __init__(self, rows: TokenRows, num_prompt_tokens: int) -> None:
        self._rows, self._num_prompt_tokens = rows, num_prompt_tokens

    def __iter__(self) -> Iterator[Any]:
        rows = [_finite(row) for row in self._rows.array()]
        yield rows[: self._num_prompt_tokens]
        yield from rows[self._num_prompt_tokens :]

    @property
    def last(self) -> list[float | None]:
        """The last row; empty if there is none."""
        return _finite(self._rows.array()[-1]) if self._rows.num_rows else []

    def json_pieces(self) -> Iterator[bytes]:
        for index, row in enumerate(self._rows.array()):
            yield b"[[" if index == 0 else b","
            yield to_json(row.tolist(), inf_nan_mode="null")
            if index == self._num_prompt_tokens - 1:
                yield b"]"
        yield b"]"


def _finite(row: np.ndarray) -> list[float | None]:
    return [value if math.isfinite(value) else None for value in row.tolist()]


class _Record(RowRecord):
    def __init__(self) -> None:
        super().__init__()
        self._num_output_tokens = 0  # in chunks so far

    def take(self, reporter: Reporter, num_tokens: int, is_last: bool) -> TokenRows | None:
        """At the end, those of all tokens but the last one, which is never computed.

        None if an abort came before the prompt's.
        """
        self._num_output_tokens += num_tokens
        num_rows = reporter.spec.num_prompt_tokens + max(0, self._num_output_tokens - 1)
        return self.take_rows(num_rows) if is_last and self.num_reported >= num_rows else None


class _LastRecord(RowRecord):
    """Keeps the newest rows of the answer; where it may be cut, all from the last token on that chunks have."""

    def __init__(self, *, may_be_cut: bool) -> None:
        super().__init__()
        self._may_be_cut = may_be_cut
        self._num_output_tokens = 0  # in chunks so far

    def keep(self, start: int, num_tokens: int, values: bytes) -> bool:
        if not self.num_reported:
            self._num_taken = start  # that of the answer's first token
        has_news = super().keep(start, num_tokens, values)
        if not self._may_be_cut:
            self._forget_before(self.num_reported - NUM_LAST_ROWS)
        return has_news

    def take(self, reporter: Reporter, num_tokens: int, is_last: bool) -> TokenRows | None:
        """At the end, that of the last token but one: the last one is never computed. No row if it has one token.

        None if an abort came before the first one.
        """
        self._num_output_tokens += num_tokens
        index = reporter.spec.num_prompt_tokens + self._num_output_tokens - 2
        if self._num_output_tokens > 1:
            self._forget_before(min(index, self.num_reported))
        if not is_last or not self._num_output_tokens:
            return None
        return self.take_rows(1) if self._num_output_tokens > 1 else TokenRows(0, b"")

    def _forget_before(self, index: int) -> None:
        if index > self._num_taken:
            self.take_rows(index - self._num_taken)


class HiddenStates(Report):
    """They come with the last chunk."""

    name = "hidden_states"
    field = "return_hidden_states"
    is_in_grpc = False
    json_field = (
        bool,
        Field(
            None,
            description="Give the last hidden state of each token but the last one of the answer, and not of a stream; "
            "with OpenAI's objects of the last but one alone",
        ),
    )

    def read(self, message: gateway_pb2.GenerateRequest, vocab_size: int) -> bytes:
        return OF_ANSWER if message.only_last_hidden_state else b""

    def record(self, spec: SequenceSpec, *, may_be_cut: bool) -> ReportRecord:
        return _LastRecord(may_be_cut=may_be_cut) if spec.features[self.name] == OF_ANSWER else _Record()

    def held(self, size: RequestSize) -> HeldBytes:
        if not size.hidden_size:
            raise InvalidRequest(f"the dense worker cannot return hidden states: {WITH_HIDDEN_STATES}", self.field)
        if size.spec.features[self.name] == OF_ANSWER:
            num_kept = size.max_tokens if size.may_be_cut else min(size.max_tokens, NUM_LAST_ROWS)
            num_bytes = BYTES_PER_VALUE + BYTES_PER_KEPT_VALUE * num_kept
        else:
            num_bytes = BYTES_PER_VALUE * (size.spec.num_prompt_tokens + size.max_tokens)
        return HeldBytes(num_bytes * size.hidden_size * size.num_answers, "hidden states")

    def json(self, parts: Sequence[TokenRows], num_prompt_tokens: int) -> HiddenStatesList | None:
        return HiddenStatesList(parts[0], num_prompt_tokens) if parts else None
