"""One vector of a whole prompt, or one of each token. The APIs for vectors ask for it; the others have no place for it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from services.common.errors import InvalidRequest
from services.gateway.features.feature import WITH_HIDDEN_STATES, HeldBytes, RequestSize
from services.gateway.features.report import Report, Reporter, ReportRecord
from services.gateway.features.token_rows import BYTES_PER_VALUE, RowRecord
from services.pb import gateway_pb2, pooling_pb2
from services.step.sequence_spec import SequenceSpec


@dataclass(frozen=True, slots=True)
class PooledVector:
    """The vectors as the dense worker reports them: before any activation, normalisation and cut."""

    values: np.ndarray  # float32 [1, size], or [num_tokens, size]

    @property
    def num_values(self) -> int:
        return 0  # no chunk is written with it


class _Record(RowRecord):
    """A worker that computes the prompt again reports it again."""

    def take(self, reporter: Reporter, num_tokens: int, is_last: bool) -> PooledVector | None:
        """None if an abort came before it."""
        request = pooling_pb2.PoolingRequest.FromString(reporter.spec.features[Pooling.name])
        num_rows = reporter.spec.num_prompt_tokens if request.all_tokens else 1
        return PooledVector(self.take_rows(num_rows).array()) if self.num_reported == num_rows else None


class Pooling(Report):
    """`services/gateway/vectors/vectors.py` sends such requests and takes what comes back."""

    name = "pooling"
    field = "return_pooled"
    is_of_prompt = True
    is_shown_with_prompt = True
    is_in_grpc = False

    def read(self, message: gateway_pb2.GenerateRequest, vocab_size: int) -> bytes:
        request = pooling_pb2.PoolingRequest(
            second_segment=message.second_segment,
            all_tokens=message.return_token_vectors,
            token_head=message.token_head,
        )
        return request.SerializeToString()

    def record(self, spec: SequenceSpec, *, may_be_cut: bool) -> ReportRecord:
        return _Record()

    def held(self, size: RequestSize) -> HeldBytes:
        if not size.hidden_size:
            raise InvalidRequest(f"the dense worker cannot give vectors: {WITH_HIDDEN_STATES}", None)
        request = pooling_pb2.PoolingRequest.FromString(size.spec.features[self.name])
        num_rows = size.spec.num_prompt_tokens if request.all_tokens else 1
        num_values = 1 if request.token_head == pooling_pb2.TOKEN_HEAD_SPARSE else size.hidden_size
        return HeldBytes(2 * BYTES_PER_VALUE * num_values * num_rows, "vectors", "send fewer inputs")
