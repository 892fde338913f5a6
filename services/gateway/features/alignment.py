"""How a decoder's prompt attends to the sound that the encoder has read. The routes for speech ask for it."""

from __future__ import annotations

from services.gateway.features.feature import HeldBytes, RequestSize
from services.gateway.features.report import Report, Reporter, ReportRecord
from services.gateway.features.token_rows import BYTES_PER_VALUE, RowRecord, TokenRows
from services.pb import gateway_pb2, source_pb2
from services.step.sequence_spec import SequenceSpec

_COPIES = 5  # two as they arrive, and what finding times takes


class _Record(RowRecord):
    """A worker that computes the prompt again reports it again."""

    def take(self, reporter: Reporter, num_tokens: int, is_last: bool) -> TokenRows | None:
        """None if an abort came before it."""
        num_rows, _ = _shape(reporter.spec)
        return self.take_rows(num_rows) if self.num_reported == num_rows else None


class Alignment(Report):
    """`services/gateway/sound/word_times.py` makes times of it."""

    name = "alignment"
    field = "alignment"
    is_of_prompt = True
    is_shown_with_prompt = True
    is_in_grpc = False

    def read(self, message: gateway_pb2.GenerateRequest, vocab_size: int) -> bytes:
        return message.alignment.SerializeToString()

    def record(self, spec: SequenceSpec, *, may_be_cut: bool) -> ReportRecord:
        return _Record()

    def held(self, size: RequestSize) -> HeldBytes:
        num_rows, num_values = _shape(size.spec)
        return HeldBytes(_COPIES * BYTES_PER_VALUE * num_rows * num_values, "the alignment of words")


def _shape(spec: SequenceSpec) -> tuple[int, int]:
    """Rows of the report, and values of each."""
    request = source_pb2.Alignment.FromString(spec.features[Alignment.name])
    return spec.num_prompt_tokens - request.first_token, request.num_rows
