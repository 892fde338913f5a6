"""One vector of a whole prompt. The APIs for vectors ask for it; the others have no place for it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from services.common.errors import InvalidRequest
from services.gateway.features.feature import HeldBytes, RequestSize
from services.gateway.features.report import Report, Reporter, ReportRecord
from services.pb import gateway_pb2, pooling_pb2


@dataclass(frozen=True, slots=True)
class PooledVector:
    """The vector as the dense worker reports it: before any activation, normalisation and cut."""

    values: np.ndarray  # float32 [size]

    @property
    def num_values(self) -> int:
        return 0  # no chunk is written with it


class _Record(ReportRecord):
    def __init__(self) -> None:
        self._vector: PooledVector | None = None

    @property
    def num_reported(self) -> int:
        return 0  # a worker that computes the prompt again reports it again

    def keep(self, start: int, num_tokens: int, values: bytes) -> bool:
        self._vector = PooledVector(np.frombuffer(values, "<f4"))
        return False

    def take(self, reporter: Reporter, num_tokens: int, is_last: bool) -> PooledVector | None:
        """None if an abort came before it."""
        return self._vector


class Pooling(Report):
    """`services/gateway/core/vectors.py` sends such requests and takes what comes back."""

    name = "pooling"
    field = "return_pooled"
    is_of_prompt = True
    is_shown_with_prompt = True
    is_in_grpc = False

    def read(self, message: gateway_pb2.GenerateRequest, vocab_size: int) -> bytes | None:
        if not message.return_pooled:
            return None
        return pooling_pb2.PoolingRequest(second_segment=message.second_segment).SerializeToString()

    def record(self) -> ReportRecord:
        return _Record()

    def held(self, size: RequestSize) -> HeldBytes:
        if not size.hidden_size:
            raise InvalidRequest("the dense worker's backend cannot give vectors: dense.backend must be torch", None)
        return HeldBytes(4 * size.hidden_size, "vectors", "send fewer inputs")
