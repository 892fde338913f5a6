"""Logits of the model itself: after each token of the prompt, and those from which output tokens were sampled."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence

from services.gateway.features.feature import Feature, HeldBytes, RequestSize
from services.gateway.features.report import AnswerMessage, Report, Reporter, ReportRecord
from services.gateway.features.token_rows import BYTES_PER_VALUE, RowRecord, TokenRows
from services.step.sequence_spec import SequenceSpec

COPIES = 3  # as they arrive, all answers in one tensor, and what a client has not read yet


class _ContextRecord(RowRecord):
    def take(self, reporter: Reporter, num_tokens: int, is_last: bool) -> TokenRows | None:
        """All of the prompt; None if an abort came before they were computed."""
        num_rows = reporter.spec.num_prompt_tokens
        return self.take_rows(num_rows) if self.num_reported == num_rows else None


class _GenerationRecord(RowRecord):
    def take(self, reporter: Reporter, num_tokens: int, is_last: bool) -> TokenRows:
        return self.take_rows(num_tokens)


class _Logits(Report):
    @abstractmethod
    def num_rows(self, size: RequestSize) -> int:
        """Rows that all answers to a request may have."""

    def held(self, size: RequestSize) -> HeldBytes:
        num_bytes = BYTES_PER_VALUE * self.num_rows(size) * size.vocab_size
        return HeldBytes((COPIES + size.num_messages) * num_bytes, "logits")

    def write(self, parts: Sequence[TokenRows], message: AnswerMessage) -> None:
        num_rows, values = sum(part.num_rows for part in parts), b"".join(part.values for part in parts)
        message.logits.num_rows = num_rows
        message.logits.vocab_size = len(values) // BYTES_PER_VALUE // num_rows if num_rows else 0
        message.logits.values = values


class ContextLogits(_Logits):
    """After each token of the prompt: the logits of the next token."""

    name = "context_logits"
    field = "return_context_logits"
    is_of_prompt = True
    is_shown_with_prompt = True

    def record(self, spec: SequenceSpec, *, may_be_cut: bool) -> ReportRecord:
        return _ContextRecord()

    def num_rows(self, size: RequestSize) -> int:
        return size.spec.num_prompt_tokens


class GenerationLogits(_Logits):
    """Of each output token: the logits from which it was sampled."""

    name = "generation_logits"
    field = "return_generation_logits"

    def record(self, spec: SequenceSpec, *, may_be_cut: bool) -> ReportRecord:
        return _GenerationRecord()

    def num_rows(self, size: RequestSize) -> int:
        return size.num_answers * size.max_tokens


def num_logits(features: Iterable[Feature], size: RequestSize) -> int:
    """Logits that all answers to a request with these features may have."""
    return size.vocab_size * sum(each.num_rows(size) for each in features if isinstance(each, _Logits))
