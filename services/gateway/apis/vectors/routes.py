"""POST /v1/embeddings."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from fastapi import APIRouter, Request
from fastapi.responses import Response

from services.gateway.apis.shared.pooled_answer import PooledAnswer, list_answer, number_pieces
from services.gateway.apis.shared.routes import json_router
from services.gateway.apis.vectors.binary_answer import BinaryAnswer
from services.gateway.apis.vectors.schema import EmbeddingList, EmbeddingRequest
from services.gateway.http.json_pieces import list_pieces
from services.gateway.vectors.vectors import PooledInput, Vectors, shaped

ROWS = 48  # of an input with a vector for each token that are shaped at once; their bytes are whole groups of base64


def vector_routes(vectors: Vectors) -> APIRouter:
    """The routes for embeddings of one gateway."""
    service = vectors.service
    router = json_router(service, "Vectors")

    @router.post("/v1/embeddings", responses={200: {"model": EmbeddingList}})
    async def create_embeddings(body: EmbeddingRequest, request: Request) -> Response:
        """The vector of each input."""
        embeds = vectors.embeds
        normalizes = body.normalizes(embeds.normalizes)
        vectors.check_dimensions(body.dimensions)
        options, kept = body.options(request), body.without_inputs()

        def shape(values: np.ndarray) -> np.ndarray:
            return shaped(values, kept.dimensions, normalizes)

        if body.is_binary:
            return BinaryAnswer(vectors, body, options, lambda each: each.values, shape)

        def write(pooled: Sequence[PooledInput]) -> Iterator[bytes]:
            objects = (
                vector_pieces("embedding", "embedding", index, each.values, shape, kept.pack)
                for index, each in enumerate(pooled)
            )
            return list_answer(options.request_id, kept.model or service.names.first, objects, pooled)

        return PooledAnswer(vectors, body.inputs, options, write)

    return router


def vector_pieces(
    kind: str,
    field: str,
    index: int,
    values: np.ndarray,
    shape: Callable[[np.ndarray], np.ndarray],
    pack: Callable[[np.ndarray], bytes] | None,
) -> Iterator[bytes]:
    """The JSON of one input's object, in which the numbers, or their bytes in base64, are `field`.

    values: float32 [size], or [num_tokens, size], which becomes a list of lists. shape: makes of rows what is shown;
    pack: makes of that the bytes, None: there are numbers
    """
    is_list = values.ndim > 1
    parts = map(shape, (values[i : i + ROWS] for i in range(0, len(values), ROWS)) if is_list else [values])
    yield b'{"object":"%b","index":%d,"%b":' % (kind.encode(), index, field.encode())
    if pack is not None:
        yield b'"'
        for part in parts:
            yield base64.b64encode(pack(part))
        yield b'"}'
    elif is_list:
        yield from list_pieces(number_pieces(row.tolist()) for part in parts for row in part)
        yield b"}"
    else:
        yield from number_pieces(next(parts).tolist())
        yield b"}"
