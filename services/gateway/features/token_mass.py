"""How likely given tokens were together at the place of each output token: one number for each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from pydantic import Field

from services.common.errors import InvalidRequest
from services.gateway.features.report import AnswerMessage, Report, Reporter, ReportRecord
from services.gateway.features.token_rows import RowRecord, TokenRows
from services.pb import gateway_pb2

MAX_TOKENS = 128


class _Record(RowRecord):
    def take(self, reporter: Reporter, num_tokens: int, is_last: bool) -> TokenRows:
        return self.take_rows(num_tokens)


class TokenMass(Report):
    """The probability of the model itself, before any sampling option."""

    name = "token_mass"
    field = "token_mass"
    json_field = (
        list[Annotated[int, Field(ge=0, le=2**32 - 1)]],
        Field(None, description="Token ids: give how likely they were together at the place of each token"),
    )
    json_neutral = ([],)

    def read(self, message: gateway_pb2.GenerateRequest, vocab_size: int) -> bytes | None:
        if not message.HasField(self.field):
            return None
        token_ids = message.token_mass.token_ids
        if not 1 <= len(token_ids) <= MAX_TOKENS or len(set(token_ids)) < len(token_ids):
            text = f"token_mass has {len(token_ids)} token ids, must have 1 to {MAX_TOKENS}, none of them twice"
            raise InvalidRequest(text, self.field)
        if max(token_ids) >= vocab_size:
            text = f"token_mass has token {max(token_ids)}, out of vocabulary: must be in [0, {vocab_size})"
            raise InvalidRequest(text, self.field)
        return message.token_mass.SerializeToString()

    def ask(self, value: list[int], message: gateway_pb2.GenerateRequest) -> None:
        message.token_mass.token_ids.extend(value)

    def record(self) -> ReportRecord:
        return _Record()

    def write(self, parts: Sequence[TokenRows], message: AnswerMessage) -> None:
        message.token_mass.extend(self.json(parts, 0))

    def json(self, parts: Sequence[TokenRows], num_prompt_tokens: int) -> list[float]:
        return [value for part in parts for value in part.array()[:, 0].tolist()]
