"""Embed and Score of the gRPC API."""

from __future__ import annotations

from collections.abc import Sequence

import grpc

from services.common.errors import InvalidRequest
from services.gateway.access.reception import current_caller, held_by_answer, traceparent_of
from services.gateway.vectors.scores import probabilities, score_pairs
from services.gateway.vectors.vectors import InputOptions, PooledInput, VectorInput, Vectors, shaped
from services.pb import gateway_pb2

VECTORS_PER_TURN = 64  # writing these takes about a millisecond


class VectorCalls:
    """Of one gateway."""

    def __init__(self, vectors: Vectors) -> None:
        self._vectors = vectors

    async def embed(
        self, request: gateway_pb2.EmbedRequest, context: grpc.aio.ServicerContext
    ) -> gateway_pb2.EmbedResponse:
        """The vector of each input. Raises a `TwostrokeError`."""
        self._vectors.check_num_given(len(request.inputs), "inputs")
        pooling = self._vectors.one_each
        dimensions = request.dimensions or None
        self._vectors.check_dimensions(dimensions)
        normalizes = request.normalize if request.HasField("normalize") else pooling.normalizes
        inputs = [_read_input(f"inputs[{i}]", each) for i, each in enumerate(request.inputs)]
        pooled = await self._pool(inputs, request.options, context, "inputs", len(inputs))
        response = gateway_pb2.EmbedResponse(labels=pooling.labels, num_prompt_tokens=_count(pooled))
        for index, each in enumerate(pooled):
            if index % VECTORS_PER_TURN == VECTORS_PER_TURN - 1:
                await self._vectors.service.heavy_work.turn()
            values = probabilities(each.values, pooling) if pooling.is_classifier else each.values
            response.vectors.add(values=shaped(values, dimensions, normalizes))
        return response

    async def score(
        self, request: gateway_pb2.ScoreRequest, context: grpc.aio.ServicerContext
    ) -> gateway_pb2.ScoreResponse:
        """The score of each pair. Raises a `TwostrokeError`."""
        self._vectors.check_num_given(len(request.pairs), "pairs")
        names = [(f"pairs[{i}].first", f"pairs[{i}].second") for i in range(len(request.pairs))]
        pairs = [(each.first, each.second) for each in request.pairs]
        inputs, scores_of = score_pairs(pairs, names, self._vectors.pooling)
        pooled = await self._pool(inputs, request.options, context, "pairs", len(pairs))
        heavy_work = self._vectors.service.heavy_work
        is_heavy = self._vectors.pooling.has_each_token
        scores = await heavy_work.in_thread(scores_of, pooled, goes_on=True) if is_heavy else scores_of(pooled)
        return gateway_pb2.ScoreResponse(scores=scores, num_prompt_tokens=_count(pooled))

    async def _pool(
        self,
        inputs: Sequence[VectorInput],
        options: gateway_pb2.InputOptions,
        context: grpc.aio.ServicerContext,
        field: str,
        num_given: int,
    ) -> list[PooledInput]:
        held = held_by_answer(context, self._vectors.service.memory)
        asked = InputOptions(
            model=options.model,
            request_id=options.request_id,
            user=options.user,
            traceparent=traceparent_of(context),
            priority=options.priority if options.HasField("priority") else None,
            max_tokens=options.truncate_tokens if options.HasField("truncate_tokens") else None,
        )
        return await self._vectors.pool(inputs, asked, current_caller(), held, field, num_given)


def _read_input(name: str, message: gateway_pb2.EmbedInput) -> VectorInput:
    kind = message.WhichOneof("input")
    if kind is None:
        raise InvalidRequest(f"{name} is empty: exactly one of text and token_ids is required", name)
    return VectorInput(name, message.text if kind == "text" else list(message.token_ids.ids))


def _count(pooled: Sequence[PooledInput]) -> int:
    return sum(each.num_tokens for each in pooled)
