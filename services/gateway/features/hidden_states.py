"""Hidden states: the last one of each token that is computed, after the final norm. SGLang has them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import Field
from pydantic_core import to_json

from services.common.errors import InvalidRequest
from services.gateway.features.feature import WITH_HIDDEN_STATES, HeldBytes, RequestSize
from services.gateway.features.report import JsonPieces, Report, Reporter, ReportRecord
from services.gateway.features.token_rows import RowRecord, TokenRows

BYTES_PER_VALUE = 56  # twice as a 32-bit float and twice as JSON, at most 24 bytes


@dataclass(frozen=True, slots=True)
class HiddenStatesList(JsonPieces):
    """SGLang's list: a list of the rows of the prompt, then one row for each token of the answer but the last one."""

    rows: TokenRows
    num_prompt_tokens: int

    def __iter__(self) -> Iterator[Any]:
        rows = self.rows.array().tolist()
        yield rows[: self.num_prompt_tokens]
        yield from rows[self.num_prompt_tokens :]

    @property
    def last(self) -> list[float | None]:
        """The row of the answer's last token that was computed; empty if there is only the prompt.

        None in place of a value that is no number, as JSON has none for it.
        """
        if self.rows.num_rows <= self.num_prompt_tokens:
            return []
        return [value if math.isfinite(value) else None for value in self.rows.array()[-1].tolist()]

    def json_pieces(self) -> Iterator[bytes]:
        for index, row in enumerate(self.rows.array()):
            yield b"[[" if index == 0 else b","
            yield to_json(row.tolist(), inf_nan_mode="null")
            if index == self.num_prompt_tokens - 1:
                yield b"]"
        yield b"]"


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

    def record(self) -> ReportRecord:
        return _Record()

    def held(self, size: RequestSize) -> HeldBytes:
        if not size.hidden_size:
            raise InvalidRequest(f"the dense worker cannot return hidden states: {WITH_HIDDEN_STATES}", self.field)
        num_rows = size.num_answers * (size.spec.num_prompt_tokens + size.max_tokens)
        return HeldBytes(BYTES_PER_VALUE * size.hidden_size * num_rows, "hidden states")

    def json(self, parts: Sequence[TokenRows], num_prompt_tokens: int) -> HiddenStatesList | None:
        return HiddenStatesList(parts[0], num_prompt_tokens) if parts else None
