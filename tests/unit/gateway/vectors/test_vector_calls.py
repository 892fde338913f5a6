"""Embed and Score of gRPC count the elements of a request before they look at any."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from services.common.errors import InvalidRequest
from services.common.pooling.pooling_config import PoolingConfig, PoolingMethod
from services.gateway.apis.twostroke.vector_calls import VectorCalls
from services.gateway.core.request_service import RequestService
from services.gateway.vectors.vectors import Vectors
from services.pb import gateway_pb2

MAX_INPUTS = 2
UNUSED = cast(Any, None)


def test_too_many_elements_are_refused_before_the_first_that_is_wrong() -> None:
    pooling = PoolingConfig(PoolingMethod.LAST, normalizes=True)
    calls = VectorCalls(Vectors(cast(RequestService, UNUSED), pooling, MAX_INPUTS))
    inputs = gateway_pb2.EmbedRequest(inputs=[gateway_pb2.EmbedInput()] * 3)
    with pytest.raises(InvalidRequest, match="inputs has 3 elements, must have 1 to 2"):
        asyncio.run(calls.embed(inputs, UNUSED))
    pairs = gateway_pb2.ScoreRequest(pairs=[gateway_pb2.TextPair()] * 3)
    with pytest.raises(InvalidRequest, match="pairs has 3 elements, must have 1 to 2"):
        asyncio.run(calls.score(pairs, UNUSED))
